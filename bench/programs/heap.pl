# heap.pl SOCKET MEBIBYTES: as heap.py, in one thread.
use strict;
use warnings;
use IO::Socket::UNIX;

my ($path, $size) = @ARGV;
my $entries = $size * 2500;
my %heap;
$heap{$_} = sprintf("%020d", $_) x 12 for 0 .. $entries - 1;
my $server = IO::Socket::UNIX->new(Local => $path, Listen => 4) or die "$path: $!";
while (my $client = $server->accept) {
    while (my $line = <$client>) {
        my ($seed, $lookups) = split ' ', $line;
        my $sum = 0;
        for (1 .. $lookups) {
            $seed = $seed * 16807 % 2147483647;
            $sum += ord(substr($heap{$seed % $entries}, -1));
        }
        print $client "$sum\n";
        $client->flush;
    }
}

<?php
// heap.php SOCKET MEBIBYTES: as heap.py, in one thread.
[, $path, $size] = $argv;
$entries = $size * 2500;
$heap = [];
for ($n = 0; $n < $entries; $n++) {
    $heap["key$n"] = str_repeat(sprintf("%020d", $n), 12);
}
$server = stream_socket_server("unix://$path");
while (true) {
    $client = stream_socket_accept($server, -1);
    while ($client && ($line = fgets($client)) !== false) {
        [$seed, $lookups] = array_map('intval', explode(' ', $line));
        $sum = 0;
        for ($i = 0; $i < $lookups; $i++) {
            $seed = $seed * 16807 % 2147483647;
            $key = $seed % $entries;
            $sum += ord($heap["key$key"][239]);
        }
        fwrite($client, "$sum\n");
    }
}

import java.io.BufferedReader;
import java.io.IOException;
import java.net.StandardProtocolFamily;
import java.net.UnixDomainSocketAddress;
import java.nio.ByteBuffer;
import java.nio.channels.Channels;
import java.nio.channels.ServerSocketChannel;
import java.nio.channels.SocketChannel;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;

/** Heap SOCKET MEBIBYTES: as heap.py, in one thread of this program's own beside those of the machine that runs it. */
class Heap {
    public static void main(String[] arguments) throws IOException {
        int entries = Integer.parseInt(arguments[1]) * 2500;
        var heap = new HashMap<Integer, byte[]>();
        for (int n = 0; n < entries; n++) {
            heap.put(n, String.format("%020d", n).repeat(12).getBytes(StandardCharsets.US_ASCII));
        }
        // What is compiled is compiled before: the time of the work is to be that of the work.
        for (int i = 0; i < 100; i++) {
            work(heap, i + 1, 10_000);
        }
        var server = ServerSocketChannel.open(StandardProtocolFamily.UNIX);
        server.bind(UnixDomainSocketAddress.of(arguments[0]));
        while (true) {
            try (SocketChannel client = server.accept()) {
                var lines = new BufferedReader(Channels.newReader(client, StandardCharsets.US_ASCII));
                for (String line; (line = lines.readLine()) != null; ) {
                    String[] words = line.split(" ");
                    long sum = work(heap, Long.parseLong(words[0]), Integer.parseInt(words[1]));
                    String answer = sum + "\n";
                    client.write(ByteBuffer.wrap(answer.getBytes(StandardCharsets.US_ASCII)));
                }
            }
        }
    }

    static long work(HashMap<Integer, byte[]> heap, long seed, int lookups) {
        long sum = 0;
        for (int i = 0; i < lookups; i++) {
            seed = seed * 16807 % 2147483647;
            byte[] found = heap.get((int) (seed % heap.size()));
            sum += found[found.length - 1];
        }
        return sum;
    }
}

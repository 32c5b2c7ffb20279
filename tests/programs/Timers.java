// Many threads, timers, a garbage collector and a just-in-time compiler.
import java.io.*;
import java.security.MessageDigest;
import java.util.*;
import java.util.concurrent.*;
import java.util.concurrent.atomic.*;

public class Timers {
    public static void main(String[] arguments) throws Exception {
        int rounds = Integer.parseInt(arguments[0]);
        int workers = 24;
        AtomicLong ticks = new AtomicLong();
        ScheduledExecutorService clock = Executors.newScheduledThreadPool(4);
        for (int i = 1; i <= 10; i++)
            clock.scheduleAtFixedRate(ticks::incrementAndGet, i, i, TimeUnit.MILLISECONDS);
        ExecutorService pool = Executors.newFixedThreadPool(workers);
        byte[][] states = new byte[workers][];
        for (int w = 0; w < workers; w++)
            states[w] = new byte[] {(byte) w};
        try (PrintWriter out = new PrintWriter(new FileWriter("sums"), true)) {
            for (int r = 0; r < rounds; r++) {
                List<Future<byte[]>> parts = new ArrayList<>();
                for (int w = 0; w < workers; w++) {
                    byte[] from = states[w];
                    int worker = w;
                    parts.add(pool.submit(() -> {
                        MessageDigest digest = MessageDigest.getInstance("SHA-256");
                        byte[] state = from;
                        Map<Integer, String> garbage = new HashMap<>();
                        for (int i = 0; i < 200; i++) {
                            state = digest.digest(state);
                            garbage.put(i, Arrays.toString(state));
                        }
                        double d = 0;
                        for (int i = 0; i < 2000; i++)
                            d += Math.sin(i * worker) * state[i % 32];
                        if (worker % 8 == 0)
                            Thread.sleep(1);
                        state[0] ^= (byte) (long) (d * 1000);
                        return state;
                    }));
                }
                byte[] sum = new byte[32];
                for (int w = 0; w < workers; w++) {
                    states[w] = parts.get(w).get();
                    for (int i = 0; i < 32; i++)
                        sum[i] ^= states[w][i];
                }
                out.println(r + " " + HexFormat.of().formatHex(sum));
            }
        }
        pool.shutdown();
        clock.shutdownNow();
        if (ticks.get() == 0) {
            System.out.println("no timer ticked");
            System.exit(1);
        }
        System.out.println("done");
    }
}

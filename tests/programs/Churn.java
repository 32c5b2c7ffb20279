import java.util.Random;
import java.util.concurrent.ConcurrentHashMap;

/** Threads that make garbage and count it, twice: the collector stops them all the time, by faults that it handles. */
public class Churn {
  static final ConcurrentHashMap<Integer, Long> counts = new ConcurrentHashMap<>();
  static final Object lock = new Object();
  static long total;

  static void wrong(String what) {
    System.out.println("wrong: " + what);
    Runtime.getRuntime().halt(3);
  }

  static void churn(int me) {
    Random random = new Random(me);
    for (long turn = 1; ; turn++) {
      byte[][] garbage = new byte[50][];
      for (int i = 0; i < garbage.length; i++) garbage[i] = new byte[random.nextInt(20000)];
      synchronized (lock) {
        counts.put(me, turn);
        total++;
      }
      if (counts.get(me) != turn || garbage[7] == null) wrong("a thread's own count");
    }
  }

  public static void main(String[] arguments) throws Exception {
    for (int i = 0; i < 4; i++) {
      final int me = i;
      new Thread(() -> { try { churn(me); } catch (Throwable e) { wrong(e.toString()); } }).start();
    }
    while (true) {
      Thread.sleep(20);
      synchronized (lock) {
        long sum = counts.values().stream().mapToLong(Long::longValue).sum();
        if (sum != total) wrong(sum + " in all, and not " + total);
        System.out.println("counted " + sum);
      }
    }
  }
}

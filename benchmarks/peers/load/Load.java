import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.Arrays;
import java.util.Locale;
import java.util.Random;
import java.util.concurrent.locks.LockSupport;

/**
 * One measurement of a Java side. Each line of standard input is one, the fields of benchmarks.lines.Load: SIZE ENTRIES
 * IN_FLIGHT SEPARATE GROUPS RATE WARM_UP_S SECONDS (a rate of 0 is as fast as possible). The answer is a line of JSON.
 */
final class Load {
    interface Side {
        void run(Load load) throws Exception;
    }

    interface Sender {
        void send(long due) throws Exception;
    }

    final int size, entries, inFlight, groups;
    final boolean separate;
    final double rate;
    final byte[] body;
    private final double warmUp, seconds;
    private long countsFrom, end;
    private double[] latencies = new double[1 << 16];
    private int count;
    private long acknowledged, failed;
    private String reason = "";

    private Load(String[] fields) {
        size = Integer.parseInt(fields[0]);
        entries = Integer.parseInt(fields[1]);
        inFlight = Integer.parseInt(fields[2]);
        separate = fields[3].equals("1");
        groups = Integer.parseInt(fields[4]);
        rate = Double.parseDouble(fields[5]);
        warmUp = Double.parseDouble(fields[6]);
        seconds = Double.parseDouble(fields[7]);
        body = new byte[size];
        new Random().nextBytes(body);
    }

    /** Answers every line of standard input. */
    static void answer(Side side) throws Exception {
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line; (line = lines.readLine()) != null; ) {
            Load load = new Load(line.split(" "));
            side.run(load);
            load.print();
        }
        System.exit(0);
    }

    /** Starts the clock; a side calls it when everything is prepared. */
    void begin() {
        countsFrom = System.nanoTime() + (long) (1e9 * warmUp);
        end = countsFrom + (long) (1e9 * seconds);
    }

    /** Counts what was acknowledged between the end of the warm-up and the end. */
    synchronized void add(long due, int entries, Object error) {
        long now = System.nanoTime();
        if (now < countsFrom || now > end) return;
        if (error != null) {
            failed += entries;
            reason = error.toString();
            return;
        }
        acknowledged += entries;
        if (count == latencies.length) latencies = Arrays.copyOf(latencies, 2 * count);
        latencies[count++] = (now - due) / 1e6;
    }

    /** Calls a sender, one of n that share the rate, at each moment at which a request is due. */
    void due(int sender, int n, Sender to) throws Exception {
        long interval = rate > 0 ? (long) (1e9 * n * entries / rate) : 0;
        long next = System.nanoTime() + interval * sender / n;
        while (true) {
            if (interval == 0) next = System.nanoTime();
            for (long left; (left = next - System.nanoTime()) > 0; ) LockSupport.parkNanos(left);
            if (next > end || System.nanoTime() > end) return;
            to.send(next);
            next += interval;
        }
    }

    /** Runs n senders, each in a thread of its own. */
    void parallel(int n, Sender number) throws Exception {
        Thread[] threads = new Thread[n];
        for (int i = 0; i < n; i++) {
            int own = i;
            threads[i] = new Thread(() -> {
                try {
                    number.send(own);
                } catch (Exception error) {
                    add(System.nanoTime(), 1, error);
                }
            });
            threads[i].start();
        }
        for (Thread thread : threads) thread.join();
    }

    private double quantile(double q) {
        return latencies[(int) ((count - 1) * q)];
    }

    private synchronized void print() {
        Arrays.sort(latencies, 0, count);
        String failures = failed == 0 ? "" : String.format(", \"failed\": %d, \"reason\": \"%s\"", failed,
            reason.replaceAll("[^ -~]|[\"\\\\]", " "));
        System.out.printf(Locale.ROOT, "{\"entries_per_s\": %.0f%s%s}%n", acknowledged / seconds, count == 0 ? "" : String.format(
            Locale.ROOT, ", \"p50_ms\": %.3f, \"p99_ms\": %.3f, \"p99_9_ms\": %.3f", quantile(0.5), quantile(0.99), quantile(0.999)),
            failures);
    }
}

import java.io.PrintWriter;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.QueryResult;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageExt;

/** Producers and consumers of RocketMQ's own client, of 4.9 and 5.3. Results are lines of fields with tabs between. */
public final class Traffic {
    static final int BATCH = 20;
    static String namesrv;
    static PrintWriter out;

    /** Arguments: command, address of the name server, file for the lines, and those of the command. */
    public static void main(String[] args) {
        int code = 1;
        try {
            run(args);
            code = 0;
        } catch (Throwable error) {
            error.printStackTrace();
        }
        System.exit(code); // threads of the client may still run
    }

    static void run(String[] args) throws Exception {
        namesrv = args[1];
        out = new PrintWriter(Files.newBufferedWriter(Path.of(args[2])), true);
        switch (args[0]) {
            case "send" -> send(Integer.parseInt(args[3]), Integer.parseInt(args[4]), args[5]);
            case "batches" -> batches(Integer.parseInt(args[3]), Integer.parseInt(args[4]), args[5]);
            case "pending" -> pending(Integer.parseInt(args[3]), Integer.parseInt(args[4]), args[5], args[6].equals("timers"));
            case "transactions" -> transactions(Integer.parseInt(args[3]), Integer.parseInt(args[4]), args[5]);
            case "take" -> take(args[3], args[4], Integer.parseInt(args[5]));
            case "work" -> work(args[3], args[4], Integer.parseInt(args[5]), Integer.parseInt(args[6]));
            case "resolve" -> resolve(args[3], Integer.parseInt(args[4]), Integer.parseInt(args[5]));
            case "ask" -> ask(Path.of(args[3]));
            default -> throw new IllegalArgumentException(args[0]);
        }
        out.close();
    }

    /** Waits until the name server knows these topics. */
    static void await(DefaultMQProducer producer, String... topics) throws Exception {
        long end = System.nanoTime() + TimeUnit.SECONDS.toNanos(120);
        for (String topic : topics) {
            while (true) {
                try {
                    producer.fetchPublishMessageQueues(topic);
                    break;
                } catch (MQClientException error) {
                    if (System.nanoTime() > end) {
                        throw error;
                    }
                    TimeUnit.MILLISECONDS.sleep(500);
                }
            }
        }
    }

    /** After three seconds a client closes the connection, and other requests on it fail: a busy machine needs longer. */
    static void patient(ClientConfig client) {
        client.setNamesrvAddr(namesrv);
        client.setMqClientApiTimeout(60_000);
    }

    static DefaultMQProducer started(DefaultMQProducer producer) throws Exception {
        patient(producer);
        producer.setSendMsgTimeout(60_000);
        producer.setRetryTimesWhenSendFailed(0);
        producer.setVipChannelEnabled(false);
        producer.start();
        return producer;
    }

    static Message message(String topic, int serial, int bytes) {
        String text = "serial=" + serial + " ";
        String body = text + "body of a message; ".repeat(Math.max(1, (bytes - text.length()) / 19));
        Message made = new Message(topic, serial % 3 == 0 ? "" : "Tag" + serial % 3, "key" + serial, body.getBytes(StandardCharsets.UTF_8));
        if (serial % 5 == 0) {
            made.setKeys("key" + serial + " second" + serial);
        }
        made.putUserProperty("serial", "" + serial);
        return made;
    }

    static synchronized void sent(int serial, String kind, SendResult result) {
        if (result.getSendStatus() != SendStatus.SEND_OK) {
            throw new IllegalStateException(serial + " " + result);
        }
        out.println(String.join("\t", "" + serial, kind, result.getMessageQueue().getTopic(),
            "" + result.getMessageQueue().getQueueId(), "" + result.getQueueOffset(), result.getMsgId()));
    }

    /** Messages of all kinds that a broker has done with after some seconds, four at a time. */
    static void send(int first, int count, String longTopic) throws Exception {
        DefaultMQProducer producer = started(new DefaultMQProducer("p_send"));
        await(producer, "Orders", "Clicks", "Batches", "Large", "Multi", "Later", "Work", longTopic);
        ExecutorService pool = Executors.newFixedThreadPool(4);
        List<Future<?>> waiting = new ArrayList<>();
        for (int serial = first; serial < first + count; serial++) {
            int number = serial;
            waiting.add(pool.submit(() -> sendOne(producer, number, longTopic)));
        }
        for (Future<?> each : waiting) {
            each.get();
        }
        pool.shutdown();
        producer.shutdown();
    }

    static Void sendOne(DefaultMQProducer producer, int serial, String longTopic) throws Exception {
        int kind = serial % 1000;
        if (kind >= 760 && kind < 840) {
            if (kind % BATCH == 0) {
                List<Message> batch = new ArrayList<>();
                for (int at = serial; at < serial + BATCH; at++) {
                    batch.add(message("Batches", at, 60));
                }
                sent(serial, "batch", producer.send(batch));
            }
        } else if (kind >= 840 && kind < 860) {
            sent(serial, "compressed", producer.send(message("Large", serial, 6000 + kind)));
        } else if (kind >= 860 && kind < 900) {
            Message made = message("Multi", serial, 100);
            MessageAccessor.putProperty(made, "INNER_MULTI_DISPATCH", kind % 2 == 0 ? "%LMQ%even" : "%LMQ%odd,%LMQ%all");
            sent(serial, "lmq", producer.send(made));
        } else if (kind >= 900 && kind < 910) {
            sent(serial, "long", producer.send(message(longTopic, serial, 80)));
        } else if (kind >= 910 && kind < 920) {
            Message made = message("Later", serial, 80);
            made.setDelayTimeLevel(1);
            sent(serial, "delayed", producer.send(made));
        } else if (kind >= 920 && kind < 940) {
            sent(serial, "work", producer.send(message("Work", serial, 80)));
        } else {
            sent(serial, "plain", producer.send(message(serial % 4 == 0 ? "Clicks" : "Orders", serial, 40 + serial % 500)));
        }
        return null;
    }

    /** Messages of one topic in batches of 1 to BATCH messages. */
    static void batches(int first, int count, String topic) throws Exception {
        DefaultMQProducer producer = started(new DefaultMQProducer("p_batches"));
        await(producer, topic);
        for (int serial = first, size = 1; serial < first + count; size = size % BATCH + 1) {
            List<Message> batch = new ArrayList<>();
            for (; batch.size() < size && serial < first + count; serial++) {
                batch.add(message(topic, serial, 60));
            }
            sent(serial - batch.size(), "" + batch.size(), producer.send(batch));
        }
        producer.shutdown();
    }

    /** Messages that their topics get later: by delay level 5, or by the timer wheel. */
    static void pending(int first, int count, String seconds, boolean timers) throws Exception {
        DefaultMQProducer producer = started(new DefaultMQProducer("p_pending"));
        await(producer, "Later");
        for (int serial = first; serial < first + count; serial++) {
            Message made = message("Later", serial, 80);
            boolean timer = timers && serial % 2 == 0;
            if (timer) {
                MessageAccessor.putProperty(made, "TIMER_DELAY_SEC", seconds);
            } else {
                made.setDelayTimeLevel(5);
            }
            sent(serial, timer ? "timer" : "delayed", producer.send(made));
        }
        producer.shutdown();
    }

    /** Transactions: of five, two are committed, one is rolled back, and two stay open; with "open" all stay open. */
    static void transactions(int first, int count, String group) throws Exception {
        TransactionMQProducer producer = new TransactionMQProducer(group);
        producer.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
                return (LocalTransactionState) argument;
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                return LocalTransactionState.UNKNOW;
            }
        });
        started(producer);
        await(producer, "Transfers");
        LocalTransactionState[] ends = {
            LocalTransactionState.COMMIT_MESSAGE, LocalTransactionState.COMMIT_MESSAGE,
            LocalTransactionState.ROLLBACK_MESSAGE, LocalTransactionState.UNKNOW, LocalTransactionState.UNKNOW};
        for (int serial = first; serial < first + count; serial++) {
            LocalTransactionState end = ends[serial % ends.length];
            sent(serial, end.name(), producer.sendMessageInTransaction(message("Transfers", serial, 90), end));
        }
        TimeUnit.SECONDS.sleep(2); // ends of transactions are sent without a response
        producer.shutdown();
    }

    /** A consumer that stops in the middle: it commits what it has, and takes no message more. */
    static void take(String group, String topic, int limit) throws Exception {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer(group);
        patient(consumer);
        consumer.setAutoCommit(false);
        consumer.setVipChannelEnabled(false);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setPullBatchSize(Math.max(8, Math.min(32, limit / 16)));
        consumer.subscribe(topic, "*");
        consumer.start();
        int taken = 0;
        for (int idle = 0; taken < limit && idle < (taken == 0 ? 60 : 12);) {
            List<MessageExt> found = consumer.poll(500);
            idle = found.isEmpty() ? idle + 1 : 0;
            for (MessageExt each : found) {
                out.println(each.getQueueId() + "\t" + each.getQueueOffset() + "\t" + each.getUserProperty("serial"));
            }
            taken += found.size();
            consumer.commitSync();
        }
        consumer.shutdown();
    }

    /** A consumer that fails: a tenth of the messages always, another tenth at the first attempt. */
    static void work(String group, String topic, int limit, int idleSeconds) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
        patient(consumer);
        consumer.setVipChannelEnabled(false);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setMaxReconsumeTimes(2);
        consumer.setPullBatchSize(8);
        consumer.setPullThresholdForQueue(8);
        consumer.setConsumeThreadMin(2);
        consumer.setConsumeThreadMax(2);
        consumer.subscribe(topic, "*");
        AtomicInteger done = new AtomicInteger();
        AtomicLong last = new AtomicLong(System.nanoTime());
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            last.set(System.nanoTime());
            MessageExt each = messages.get(0);
            int serial = Integer.parseInt(each.getUserProperty("serial"));
            boolean fails = serial % 10 == 0 || serial % 10 == 1 && each.getReconsumeTimes() == 0;
            synchronized (out) {
                out.println(serial + "\t" + (fails ? "failed" : "done") + "\t" + each.getReconsumeTimes());
            }
            done.incrementAndGet();
            return fails ? ConsumeConcurrentlyStatus.RECONSUME_LATER : ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        while (done.get() < limit && System.nanoTime() - last.get() < TimeUnit.SECONDS.toNanos(idleSeconds)) {
            TimeUnit.MILLISECONDS.sleep(20);
        }
        consumer.suspend();
        while (System.nanoTime() - last.get() < TimeUnit.SECONDS.toNanos(2)) {
            TimeUnit.MILLISECONDS.sleep(100);
        }
        consumer.shutdown();
    }

    /** Answers the broker's checks of so many open transactions until none comes: commits even serials, rolls odd ones back. */
    static void resolve(String group, int count, int quietSeconds) throws Exception {
        TransactionMQProducer producer = new TransactionMQProducer(group);
        Set<Integer> asked = ConcurrentHashMap.newKeySet();
        AtomicLong last = new AtomicLong(System.nanoTime());
        producer.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
                return LocalTransactionState.UNKNOW;
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                int serial = Integer.parseInt(message.getUserProperty("serial"));
                synchronized (out) {
                    out.println("" + serial);
                }
                asked.add(serial);
                last.set(System.nanoTime());
                return serial % 2 == 0 ? LocalTransactionState.COMMIT_MESSAGE : LocalTransactionState.ROLLBACK_MESSAGE;
            }
        });
        started(producer);
        await(producer, "Transfers");
        var client = producer.getDefaultMQProducerImpl().getMqClientFactory(); // a broker asks whom it knows
        client.updateTopicRouteInfoFromNameServer("Transfers");
        client.sendHeartbeatToAllBrokerWithLock();
        long end = System.nanoTime() + TimeUnit.SECONDS.toNanos(300);
        long quiet = TimeUnit.SECONDS.toNanos(quietSeconds); // an answer has no response: a lost one is asked for again
        while (System.nanoTime() < end && (asked.size() < count || System.nanoTime() - last.get() < quiet)) {
            TimeUnit.MILLISECONDS.sleep(100);
        }
        producer.shutdown();
    }

    /** Queries by unique id and by key, as an owner's tools: each line of the file has topic, unique id and key. */
    static void ask(Path wanted) throws Exception {
        DefaultMQProducer producer = started(new DefaultMQProducer("p_ask"));
        for (String line : Files.readAllLines(wanted)) {
            String[] fields = line.split("\t");
            await(producer, fields[0]);
            MessageExt viewed = producer.getDefaultMQProducerImpl().queryMessageByUniqKey(fields[0], fields[1]);
            QueryResult found = producer.queryMessage(fields[0], fields[2], 64, 0, Long.MAX_VALUE);
            List<String> serials = new ArrayList<>();
            found.getMessageList().forEach(each -> serials.add(each.getUserProperty("serial")));
            out.println(viewed.getUserProperty("serial") + "\t" + String.join(",", serials));
        }
        producer.shutdown();
    }
}

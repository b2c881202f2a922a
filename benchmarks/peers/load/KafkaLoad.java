import java.time.Duration;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.Semaphore;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/** Load for Kafka, by its own producer: KafkaLoad BOOTSTRAP FLUSH_MESSAGES (0 = Kafka's default, the page cache). */
final class KafkaLoad {
    private static final Set<String> TOPICS = new HashSet<>();

    private static KafkaProducer<byte[], byte[]> producer(String address, int batchBytes, int lingerMs, long memory) {
        return new KafkaProducer<>(Map.of(
            "bootstrap.servers", address, "acks", "all", "batch.size", batchBytes, "linger.ms", lingerMs,
            "buffer.memory", memory, "max.request.size", 2 << 20, "compression.type", "none"),
            new ByteArraySerializer(), new ByteArraySerializer());
    }

    /** Returns a topic of one partition for each group; its three replicas are in sync. */
    private static String topic(String address, int partitions, String flushMessages) throws Exception {
        String name = "t" + flushMessages + "-" + partitions;
        if (TOPICS.add(name)) {
            try (Admin admin = Admin.create(Map.of("bootstrap.servers", address))) {
                NewTopic topic = new NewTopic(name, partitions, (short) 3);
                if (!flushMessages.equals("0")) topic.configs(Map.of("flush.messages", flushMessages));
                admin.createTopics(List.of(topic)).all().get();
                boolean ready = false;
                while (!ready) {
                    Thread.sleep(200);
                    ready = admin.describeTopics(List.of(name)).allTopicNames().get().get(name).partitions().stream()
                        .allMatch(each -> each.isr().size() == 3);
                }
            }
        }
        return name;
    }

    /** Each sender waits for its record, so a request has one: as many independent clients. */
    private static void separate(Load load, String address, String topic) throws Exception {
        ProducerRecord<byte[], byte[]> record = new ProducerRecord<>(topic, 0, null, load.body);
        List<KafkaProducer<byte[], byte[]>> producers = new ArrayList<>();
        for (int i = 0; i < load.inFlight; i++) producers.add(producer(address, 16384, 0, 1 << 20));
        try {
            load.parallel(load.inFlight, sender -> producers.get((int) sender).send(record).get()); // connected, with its id
            load.begin();
            load.parallel(load.inFlight, sender -> load.due((int) sender, load.inFlight, due -> {
                producers.get((int) sender).send(record).get();
                load.add(due, 1, null);
            }));
        } finally {
            for (KafkaProducer<byte[], byte[]> each : producers) each.close();
        }
    }

    /** One producer, which joins records; larger requests fill its memory of 64 MiB. */
    private static void joined(Load load, String address, String topic) throws Exception {
        boolean large = load.entries > 1;
        Semaphore free = new Semaphore(large ? Integer.MAX_VALUE : load.inFlight);
        KafkaProducer<byte[], byte[]> producer = producer(address, 1 << 20, large ? 5 : 0, 64 << 20);
        try {
            int[] next = {0};
            load.begin();
            load.due(0, 1, due -> {
                for (int i = 0; i < load.entries; i++) {
                    free.acquire();
                    long begun = load.rate > 0 ? due : System.nanoTime();
                    ProducerRecord<byte[], byte[]> record = new ProducerRecord<>(topic, next[0]++ % load.groups, null, load.body);
                    producer.send(record, (metadata, error) -> {
                        free.release();
                        load.add(begun, 1, error);
                    });
                }
            });
        } finally {
            producer.close(Duration.ofSeconds(1)); // the rest of its memory is not waited for
        }
    }

    public static void main(String[] arguments) throws Exception {
        String address = arguments[0], flushMessages = arguments[1];
        Load.answer(load -> {
            String topic = topic(address, load.groups, flushMessages);
            if (load.separate) separate(load, address, topic);
            else joined(load, address, topic);
        });
    }
}

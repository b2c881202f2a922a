import io.openmessaging.storage.dledger.DLedgerConfig;
import io.openmessaging.storage.dledger.DLedgerServer;
import io.openmessaging.storage.dledger.client.DLedgerClient;
import io.openmessaging.storage.dledger.protocol.AppendEntryResponse;
import io.openmessaging.storage.dledger.protocol.BatchAppendEntryRequest;
import java.util.Collections;
import java.util.concurrent.Semaphore;

/**
 * A node of Java DLedger and load for it: DLedgerLoad node ID PEERS DIRECTORY, or DLedgerLoad client PEERS.
 *
 * A client appends one entry per request, because its protocol has no other one. A node that leads appends batches by
 * DLedger's own method in its own process, as a broker of RocketMQ does; a node that does not lead answers with zero.
 */
final class DLedgerLoad {
    private static final String GROUP = "g";
    private static final int OK = 200;

    private static void node(String id, String peers, String directory) throws Exception {
        DLedgerConfig config = new DLedgerConfig();
        config.setGroup(GROUP);
        config.setSelfId(id);
        config.setPeers(peers);
        config.setStoreBaseDir(directory);
        DLedgerServer server = new DLedgerServer(config);
        server.startup();
        Load.answer(load -> {
            if (!server.getMemberState().isLeader()) return;
            load.begin();
            Semaphore free = new Semaphore(load.inFlight);
            load.due(0, 1, due -> {
                free.acquire();
                BatchAppendEntryRequest request = new BatchAppendEntryRequest();
                request.setGroup(GROUP);
                request.setRemoteId(id);
                request.setBatchMsgs(Collections.nCopies(load.entries, load.body));
                long begun = load.rate > 0 ? due : System.nanoTime();
                server.handleAppend(request).whenComplete((response, error) -> {
                    free.release();
                    load.add(begun, load.entries, error != null ? error : failure(response));
                });
            });
            free.acquire(load.inFlight);
        });
    }

    private static String failure(AppendEntryResponse response) {
        return response.getCode() == OK ? null : "code " + response.getCode();
    }

    private static void client(String peers) throws Exception {
        DLedgerClient client = new DLedgerClient(GROUP, peers);
        client.startup();
        Load.answer(load -> {
            load.begin();
            load.parallel(load.inFlight, sender -> load.due((int) sender, load.inFlight, due ->
                load.add(due, 1, failure(client.append(load.body)))));
        });
    }

    public static void main(String[] arguments) throws Exception {
        if (arguments[0].equals("node")) node(arguments[1], arguments[2], arguments[3]);
        else client(arguments[1]);
    }
}

"""Limits on how much of a node a client, a stranger or a slow peer takes: the page on denial of service.

Numbers are fields of ``dledger_core.config.Limits``, or constants next to the code that is named here.
Attacks are in ``tests/server/attacks``: each runs against a cluster while another client is served.

====================  ==============================================================  =================================
taken                 limited by                                                      code
====================  ==============================================================  =================================
connections           per node and address: BUSY, QUOTA_EXCEEDED; nodes do not count  ``connection_limits``
time without hello    seconds, then closed                                            ``listening`` (on_made)
TLS handshakes        rate per node and address, number in progress                   ``tls_listener``, ``rates``
bytes before hello    4 KiB per frame                                                 ``session``
headers of clients    bytes, lists and maps, lengths claimed                          ``frame`` (raise_limit)
unfinished frames     memory from the first byte: BUSY; seconds, then closed          ``budget`` (PayloadCharge),
                                                                                      ``deadlines``
idle connections      seconds, then closed                                            ``deadlines``
the event loop        0.5 ms (alone: 3) per principal or address and iteration        ``fair_queue`` (Fairness)
batches of appends    in turn, one connection after the other                         ``fair_queue``, by
                                                                                      ``server.services.appends``
appends in memory     bytes per node: BUSY; per connection: it is not read meanwhile  ``budget``, ``client_flow``
responses in memory   bytes per node and principal; of a client that does not take    ``budget``, ``client_flow``,
                      them: it is not read, and closed after some time                ``deadlines``
copies in TLS         256 KiB per connection                                          ``tls_write_buffer``
requests in progress  per connection: BUSY                                            ``client_flow``
large reads, digests  at once per connection and per node: they wait                  ``client_flow``,
                                                                                      ``server.services``
waiting requests      each is woken for its own entry alone                           ``server.services.growth``
shares of principals  connections, bytes, polls, digests, pins ...: QUOTA_EXCEEDED    ``quotas``
rows of tables        producers and open transactions of a principal                  ``server.services.row_quotas``
lines of logs         50 of a kind in 10 s; of the admin log 256 KiB a day            ``rates``
remoting, HTTP port   connections, requests, time for each; TLS as above              ``rocketmq.remoting.port``,
                                                                                      ``server.monitoring.http_port``
bytes between nodes   a slow peer gets no more messages until it receives them        ``server.replica.peers``
====================  ==============================================================  =================================

Two rules hold everywhere. A refusal costs less than a service: a limit is checked before memory is taken. A refusal
contains the time to wait, and a single request is always admitted when nothing else is charged.
"""

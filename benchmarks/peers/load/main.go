// Load for NATS JetStream and etcd: load nats|etcd ADDRESS,ADDRESS,ADDRESS
//
// Each line of standard input is a measurement, the fields of benchmarks.lines.Load: SIZE ENTRIES IN_FLIGHT SEPARATE
// GROUPS RATE WARM_UP_S SECONDS (a rate of 0 is as fast as possible). The answer is a line of JSON.
package main

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"log"
	"math"
	"os"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	clientv3 "go.etcd.io/etcd/client/v3"
)

type load struct {
	size, entries, inFlight, separate, groups int
	rate, warmUp, seconds                     float64
	body                                      []byte
	countsFrom, end                           time.Time
}

// What was acknowledged between the end of the warm-up and the end.
type measured struct {
	sync.Mutex
	entries   int
	failed    int
	reason    string
	latencies []float64
}

func (m *measured) add(l *load, due time.Time, entries int, err error) {
	now := time.Now()
	if now.Before(l.countsFrom) || now.After(l.end) {
		return
	}
	m.Lock()
	defer m.Unlock()
	if err != nil {
		m.failed += entries
		m.reason = err.Error()
		return
	}
	m.entries += entries
	m.latencies = append(m.latencies, 1000*now.Sub(due).Seconds())
}

func (m *measured) print(l *load) {
	sort.Float64s(m.latencies)
	answer := map[string]any{"entries_per_s": int(float64(m.entries) / l.seconds)}
	for name, q := range map[string]float64{"p50_ms": 0.5, "p99_ms": 0.99, "p99_9_ms": 0.999} {
		if n := len(m.latencies); n > 0 {
			answer[name] = math.Round(1000*m.latencies[int(float64(n-1)*q)]) / 1000
		}
	}
	if m.failed > 0 {
		answer["failed"], answer["reason"] = m.failed, m.reason
	}
	line, _ := json.Marshal(answer)
	fmt.Println(string(line))
}

// due calls send with each moment at which a request is due, in one of n senders that share the rate.
func (l *load) due(sender, n int, send func(time.Time)) {
	next := time.Now()
	interval := time.Duration(0)
	if l.rate > 0 {
		interval = time.Duration(float64(n*l.entries) / l.rate * float64(time.Second))
		next = next.Add(interval * time.Duration(sender) / time.Duration(n))
	}
	for {
		if interval > 0 {
			time.Sleep(time.Until(next))
		} else {
			next = time.Now()
		}
		if next.After(l.end) || time.Now().After(l.end) {
			return
		}
		send(next)
		next = next.Add(interval)
	}
}

func parallel(n int, run func(int)) {
	var running sync.WaitGroup
	for i := range n {
		running.Go(func() { run(i) })
	}
	running.Wait()
}

// Every message is published by itself: JetStream's clients do not join them.
type natsSide struct{ js jetstream.JetStream }

const pendingMax = 4000 // the default of the client; a leader of a stream rejects more than 10,000

func (s *natsSide) prepare(l *load) {
	for i := range l.groups {
		name := fmt.Sprintf("s%d-%d", l.groups, i)
		config := jetstream.StreamConfig{Name: name, Subjects: []string{name}, Replicas: 3, Storage: jetstream.FileStorage}
		for { // until the servers have elected their leader
			limit, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			_, err := s.js.CreateOrUpdateStream(limit, config)
			cancel()
			if err == nil {
				break
			}
			log.Print(err)
			time.Sleep(200 * time.Millisecond)
		}
	}
}

func (s *natsSide) run(l *load, m *measured) {
	type sent struct {
		due    time.Time
		future jetstream.PubAckFuture
		err    error
	}
	parallel(l.groups, func(group int) {
		subject := fmt.Sprintf("s%d-%d", l.groups, group)
		window := max(1, min(pendingMax, l.inFlight*l.entries)/l.groups)
		free, pending := make(chan struct{}, window), make(chan sent, window)
		go func() {
			l.due(group, l.groups, func(due time.Time) {
				for range l.entries {
					free <- struct{}{}
					if l.rate == 0 {
						due = time.Now()
					}
					future, err := s.js.PublishAsync(subject, l.body)
					pending <- sent{due, future, err}
				}
			})
			close(pending)
		}()
		for each := range pending {
			if each.err == nil {
				select {
				case <-each.future.Ok():
				case each.err = <-each.future.Err():
				case <-time.After(10 * time.Second):
					each.err = fmt.Errorf("no acknowledgement")
				}
			}
			<-free
			m.add(l, each.due, 1, each.err)
		}
	})
}

// A single is a Put, a larger request a transaction of Puts of different keys; all go to the leader.
type etcdSide struct {
	client *clientv3.Client
	keys   atomic.Int64
}

func (s *etcdSide) prepare(*load) {}

func (s *etcdSide) put(l *load) error {
	limit, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	puts := make([]clientv3.Op, l.entries)
	for i := range puts {
		puts[i] = clientv3.OpPut(fmt.Sprintf("%012d", s.keys.Add(1)), string(l.body))
	}
	if l.entries == 1 {
		_, err := s.client.Do(limit, puts[0])
		return err
	}
	_, err := s.client.Txn(limit).Then(puts...).Commit()
	return err
}

func (s *etcdSide) run(l *load, m *measured) {
	parallel(l.inFlight, func(sender int) {
		l.due(sender, l.inFlight, func(due time.Time) { m.add(l, due, l.entries, s.put(l)) })
	})
}

type side interface {
	prepare(*load)
	run(*load, *measured)
}

func connect(kind string, addresses []string) side {
	if kind == "nats" {
		connection, err := nats.Connect(strings.Join(addresses, ","), nats.MaxReconnects(-1), nats.RetryOnFailedConnect(true))
		check(err)
		js, err := jetstream.New(connection, jetstream.WithPublishAsyncMaxPending(100_000))
		check(err)
		return &natsSide{js}
	}
	client, err := clientv3.New(clientv3.Config{Endpoints: addresses, DialTimeout: 10 * time.Second})
	check(err)
	for _, address := range addresses {
		status, err := client.Status(context.Background(), address)
		check(err)
		if status.Leader == status.Header.MemberId {
			client.SetEndpoints(address)
		}
	}
	return &etcdSide{client: client}
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func main() {
	s := connect(os.Args[1], strings.Split(os.Args[2], ","))
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		l := &load{}
		_, err := fmt.Sscan(lines.Text(), &l.size, &l.entries, &l.inFlight, &l.separate, &l.groups, &l.rate, &l.warmUp, &l.seconds)
		check(err)
		l.body = make([]byte, l.size)
		rand.Read(l.body)
		s.prepare(l)
		l.countsFrom = time.Now().Add(time.Duration(l.warmUp * float64(time.Second)))
		l.end = l.countsFrom.Add(time.Duration(l.seconds * float64(time.Second)))
		m := &measured{}
		s.run(l, m)
		m.print(l)
	}
}

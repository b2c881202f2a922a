// Command porcupine checks the history of a chaos run (lines of JSON, see tests/chaos/recorder.py) for linearizability.
//
// It shares nothing with the checker in Python. The model is one log that only grows; its state is the index after the
// last entry and the chain of appends so far.
//
//   - An append takes effect at one moment, at the index of its response, which is the end of the log then; entries
//     of no client (control entries) may lie between, entries of clients may not.
//   - A linearizable read that only the end of the log limited shows the whole end of the log at one moment.
//   - Every other read may be late. What it shows was in the log before its response, entry by entry, and nothing is
//     missing between its rows; a read of committed transactions may leave out entries of attempts. So it needs no
//     moment of its own: it is compared with the whole chain, and the appends that it shows end with it at the latest.
//
// An append of unknown outcome is pending: it may take effect at any time after its call. Its index is the one at which
// some read shows it; nothing depends on one that no read shows, so it is left out. An append that failed never takes
// effect. The calls of one producer and sequence are one append, whose later responses repeat the first. An attempt of a
// transaction may be appended again by its client, and each place at which a read shows it is an append.
//
// The log need not be split to be checked in seconds: because every append has its index, the order of appends is given,
// and the search decides only where the reads are. Decisions of transactions are left to the checker in Python.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"sort"
	"time"

	"github.com/anishathalye/porcupine"
)

const never = math.MaxInt64

type line struct {
	Op, Client, Status, Error, Producer, Attempt string
	Start, End                                   float64
	First, Last                                  int64
	FromIndex                                    int64 `json:"from_index"`
	NextIndex                                    int64 `json:"next_index"`
	Linearizable, Uncommitted, Full              bool
	Indexes                                      []int64
	Hashes                                       []uint64
}

// The input of one operation of the model.
type call struct {
	kind    string // append or read
	first   int64
	hashes  []uint64
	attempt bool
	read    *line
}

// One append in the chain. jump leads over many appends, so that old ones are found in logarithmic time.
type appended struct {
	parent, jump *appended
	depth        int
	first, end   int64
	hashes       []uint64
	attempt      bool
}

type state struct {
	end  int64
	head *appended
}

func (s state) push(c *call) state {
	end := c.first + int64(len(c.hashes))
	made := &appended{parent: s.head, jump: s.head, first: c.first, end: end, hashes: c.hashes, attempt: c.attempt}
	if p := s.head; p != nil {
		made.depth = p.depth + 1
		if p.jump != nil && p.jump.jump != nil && p.depth-p.jump.depth == p.jump.depth-p.jump.jump.depth {
			made.jump = p.jump.jump
		}
	}
	return state{end, made}
}

// before returns the last append that begins below index.
func (s state) before(index int64) *appended {
	at := s.head
	for at != nil && at.first >= index {
		if at.jump != nil && at.jump.first >= index {
			at = at.jump
		} else {
			at = at.parent
		}
	}
	return at
}

// shows tells whether the log has the rows of a read, and no entry between them that the read must show.
func (s state) shows(r *line) bool {
	row := len(r.Indexes) - 1
	for at := s.before(r.NextIndex); at != nil && at.end > r.FromIndex; at = at.parent {
		for i := len(at.hashes) - 1; i >= 0; i-- {
			index := at.first + int64(i)
			if index < r.FromIndex || index >= r.NextIndex {
				continue
			}
			if row >= 0 && r.Indexes[row] == index && r.Hashes[row] == at.hashes[i] {
				row--
			} else if r.Uncommitted || !at.attempt || (row >= 0 && r.Indexes[row] >= index) {
				return false
			}
		}
	}
	return row < 0
}

// model returns the log. claimed are the first indexes of all appends in order: none of them is skipped.
func model(claimed []int64) porcupine.Model {
	free := func(from, until int64) bool {
		i := sort.Search(len(claimed), func(i int) bool { return claimed[i] >= from })
		return i == len(claimed) || claimed[i] >= until
	}
	return porcupine.Model{
		Init: func() interface{} { return state{} },
		Step: func(before, input, _ interface{}) (bool, interface{}) {
			s, c := before.(state), input.(*call)
			switch c.kind {
			case "append":
				if c.first < s.end || !free(s.end, c.first) {
					return false, s
				}
				return true, s.push(c)
			}
			return c.read.NextIndex >= s.end && s.shows(c.read), state{c.read.NextIndex, s.head}
		},
		Equal: func(a, b interface{}) bool { return a.(state) == b.(state) },
	}
}

func load(path string) ([]*line, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	var lines []*line
	rows := bufio.NewScanner(file)
	rows.Buffer(nil, 1<<28)
	for rows.Scan() {
		found := &line{}
		if err := json.Unmarshal(rows.Bytes(), found); err != nil {
			return nil, fmt.Errorf("line %d: %w", len(lines)+1, err)
		}
		lines = append(lines, found)
	}
	return lines, rows.Err()
}

// nanoseconds keeps the order of the recorder's clock, which is in seconds.
func nanoseconds(seconds float64) int64 { return int64(seconds * 1e9) }

// operations returns what the model is to explain, or why no model can.
func operations(lines []*line) ([]porcupine.Operation, []int64, error) {
	places := map[uint64]map[int64]bool{} // hash of a body -> the indexes at which reads show it
	for _, each := range lines {
		if each.Op == "read" && each.Status == "ok" {
			for i, hash := range each.Hashes {
				if places[hash] == nil {
					places[hash] = map[int64]bool{}
				}
				places[hash][each.Indexes[i]] = true
			}
		}
	}
	var made []porcupine.Operation
	var claimed []int64
	var late []*line
	add := func(c *call, start float64, end int64) {
		made = append(made, porcupine.Operation{Input: c, Call: nanoseconds(start), Return: end})
		if c.kind == "append" {
			claimed = append(claimed, c.first)
		}
	}
	appends := map[string][]*line{}
	var names []string
	for i, each := range lines {
		switch {
		case each.Op == "read" && each.Status == "ok" && !(each.Linearizable && each.Uncommitted && each.Full):
			late = append(late, each)
		case each.Op == "read" && each.Status == "ok":
			add(&call{kind: "read", read: each}, each.Start, nanoseconds(each.End))
		case each.Op == "append":
			name := each.Producer
			if name == "" {
				name = fmt.Sprintf("call %d", i)
			}
			if appends[name] == nil {
				names = append(names, name)
			}
			appends[name] = append(appends[name], each)
		}
	}
	for _, name := range names {
		calls := appends[name]
		start, hashes, attempt := calls[0].Start, calls[0].Hashes, calls[0].Attempt != ""
		var answered []*line
		open := false
		for _, each := range calls {
			start = math.Min(start, each.Start)
			if each.Status == "ok" {
				answered = append(answered, each)
			}
			// A refusal because of the transaction may be the response to a repeated request that took effect.
			open = open || each.Status == "unknown" || (attempt && each.Error == "TRANSACTION")
		}
		sort.Slice(answered, func(i, j int) bool { return answered[i].End < answered[j].End })
		taken := map[int64]bool{}
		for i, each := range answered {
			if each.Last-each.First+1 != int64(len(hashes)) || each.First != answered[0].First {
				return nil, nil, fmt.Errorf("%s has the range [%d, %d]", name, each.First, each.Last)
			}
			if i == 0 {
				add(&call{kind: "append", first: each.First, hashes: hashes, attempt: attempt}, start, nanoseconds(each.End))
			}
			taken[each.First] = true
		}
		if !attempt && (len(answered) > 0 || !open) {
			continue
		}
		if !open && len(answered) == 0 {
			continue
		}
		for offset, hash := range hashes {
			for index := range places[hash] {
				if first := index - int64(offset); !taken[first] && (attempt || len(taken) == 0) {
					taken[first] = true
					add(&call{kind: "append", first: first, hashes: hashes, attempt: attempt}, start, never)
				}
			}
		}
	}
	sort.Slice(claimed, func(i, j int) bool { return claimed[i] < claimed[j] })
	if err := bound(made, late); err != nil {
		return nil, nil, err
	}
	for i := range made {
		made[i].ClientId = i // no client is part of the model
	}
	return made, claimed, nil
}

// bound compares late reads with all appends, and ends each append with the first response that needs it.
func bound(made []porcupine.Operation, late []*line) error {
	var order []*porcupine.Operation
	for i := range made {
		if made[i].Input.(*call).kind == "append" {
			order = append(order, &made[i])
		}
	}
	sort.Slice(order, func(i, j int) bool { return order[i].Input.(*call).first < order[j].Input.(*call).first })
	var whole state
	for _, each := range order {
		c := each.Input.(*call)
		if c.first < whole.end {
			return fmt.Errorf("two appends have the index %d", c.first)
		}
		whole = whole.push(c)
	}
	sort.Slice(late, func(i, j int) bool { return late[i].NextIndex > late[j].NextIndex })
	next, until := 0, int64(never)
	for i := len(order) - 1; i >= 0; i-- {
		first := order[i].Input.(*call).first
		for ; next < len(late) && late[next].NextIndex > first; next++ {
			if end := nanoseconds(late[next].End); end < until {
				until = end
			}
		}
		if until < order[i].Return {
			order[i].Return = until
		}
		if i+1 < len(order) && order[i+1].Return < order[i].Return {
			order[i].Return = order[i+1].Return // an append is never before one with a lower index
		}
		if order[i].Return < order[i].Call {
			return fmt.Errorf("index %d was shown, or given to a later append, before its append was called", first)
		}
	}
	for _, each := range late {
		if !whole.shows(each) {
			return fmt.Errorf("%s read [%d, %d) with rows that the log lacks or without some that it has", each.Client, each.FromIndex, each.NextIndex)
		}
	}
	return nil
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: porcupine HISTORY")
		os.Exit(2)
	}
	lines, err := load(os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(2)
	}
	began := time.Now()
	made, claimed, err := operations(lines)
	if err != nil {
		fmt.Println("not linearizable:", err)
		os.Exit(1)
	}
	result := porcupine.CheckOperationsTimeout(model(claimed), made, time.Minute)
	fmt.Printf("%d operations, %d of them appends: %s, %.2f s\n", len(made), len(claimed), result, time.Since(began).Seconds())
	if result != porcupine.Ok {
		os.Exit(1)
	}
}

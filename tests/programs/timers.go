// Goroutines, timers and channels: workers compute, tickers tick, one collector writes what does not depend on time.
package main

import (
	"crypto/sha256"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

func main() {
	rounds, _ := strconv.Atoi(os.Args[1])
	runtime.GOMAXPROCS(4)
	out, err := os.Create("sums")
	if err != nil {
		panic(err)
	}
	var ticks, lates atomic.Int64
	for i := 0; i < 20; i++ {
		go func(every time.Duration) {
			for range time.Tick(every) {
				ticks.Add(1)
			}
		}(time.Duration(1+i) * time.Millisecond)
	}
	const workers = 64
	type result struct {
		worker, round int
		sum           [32]byte
	}
	results := make(chan result, 8)
	var group sync.WaitGroup
	for w := 0; w < workers; w++ {
		group.Add(1)
		go func(w int) {
			defer group.Done()
			state := sha256.Sum256([]byte{byte(w)})
			garbage := make(map[int][]byte)
			for r := 0; r < rounds; r++ {
				for i := 0; i < 300; i++ {
					state = sha256.Sum256(state[:])
				}
				garbage[r%50] = append([]byte(nil), state[:]...) // something for the collector
				if r%10 == w%10 {
					began := time.Now()
					<-time.After(time.Millisecond)
					if time.Since(began) < time.Millisecond {
						lates.Add(1)
					}
				}
				results <- result{w, r, state}
			}
		}(w)
	}
	go func() { group.Wait(); close(results) }()
	var total [32]byte
	byRound := make(map[int]int)
	sums := make(map[int][32]byte)
	next := 0
	for r := range results {
		sum := sums[r.round]
		for i := range sum {
			sum[i] ^= r.sum[i]
		}
		sums[r.round] = sum
		byRound[r.round]++
		for byRound[next] == workers {
			fmt.Fprintf(out, "%d %x\n", next, sums[next])
			for i := range total {
				total[i] ^= sums[next][i]
			}
			delete(sums, next)
			delete(byRound, next)
			next++
		}
	}
	if ticks.Load() == 0 || lates.Load() != 0 {
		fmt.Println("timers are wrong:", ticks.Load(), lates.Load())
		os.Exit(1)
	}
	fmt.Printf("done %x\n", total)
}

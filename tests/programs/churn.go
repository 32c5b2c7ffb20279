// Goroutines that make garbage and count it, twice.
package main

import (
	"fmt"
	"os"
	"sync"
	"time"
)

func wrong(what string, a, b int64) {
	fmt.Println("wrong:", what, a, b)
	os.Exit(3)
}

func main() {
	var lock sync.Mutex
	counts, total := map[int]int64{}, int64(0)
	queue := make(chan int64, 100)
	for me := 0; me < 50; me++ {
		go func(me int) {
			for turn := int64(1); ; turn++ {
				garbage := make([][]byte, 20)
				for i := range garbage {
					garbage[i] = make([]byte, 1000+i*me)
				}
				lock.Lock()
				counts[me]++
				total++
				if counts[me] != turn {
					wrong("a goroutine's own count", counts[me], turn)
				}
				lock.Unlock()
				queue <- turn
			}
		}(me)
	}
	go func() {
		for range queue {
		}
	}()
	for {
		time.Sleep(20 * time.Millisecond)
		lock.Lock()
		sum := int64(0)
		for _, count := range counts {
			sum += count
		}
		if sum != total {
			wrong("all", sum, total)
		}
		lock.Unlock()
		fmt.Println("counted", sum)
	}
}

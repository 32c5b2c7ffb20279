// Loops without a call in them: only a signal to their threads stops them for the collector.
package main

import (
	"fmt"
	"runtime"
	"time"
)

var sums [3]uint64

func main() {
	runtime.GOMAXPROCS(4)
	for i := range sums {
		go func() {
			x := uint64(i)
			for {
				for j := 0; j < 1<<40; j++ {
					x = x*6364136223846793005 + 1
				}
				sums[i] = x
			}
		}()
	}
	for turn := 1; ; turn++ {
		runtime.GC()
		fmt.Println("counted", turn)
		time.Sleep(20 * time.Millisecond)
	}
}

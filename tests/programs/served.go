// An HTTP server: says of each client which number it had before.

//go:debug multipathtcp=2

package main

import (
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"
)

func main() {
	var seen sync.Map
	ticks := time.NewTicker(10 * time.Millisecond)
	go func() {
		for range ticks.C {
			seen.Range(func(_, _ any) bool { return true })
		}
	}()
	http.HandleFunc("/", func(response http.ResponseWriter, request *http.Request) {
		words := strings.Split(request.URL.Path, "/")
		var n int
		fmt.Sscan(words[2], &n)
		before, known := seen.Load(words[1])
		seen.Store(words[1], n)
		if !known {
			before = -1
		}
		body := fmt.Sprintf(`{"before": %v, "junk": %q}`, before, strings.Repeat("x", n%5000))
		response.Header().Set("Content-Length", fmt.Sprint(len(body)))
		fmt.Fprint(response, body)
	})
	fmt.Fprintln(os.Stderr, http.ListenAndServe("127.0.0.1:"+os.Args[1], nil))
}

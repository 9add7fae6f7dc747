// Reads a number, and crashes in a goroutine if it is 2: at an address that is not mapped.
package main

import (
	"fmt"
	"unsafe"
)

type order struct {
	name  string
	count *int64
}

//go:noinline
func total(o *order) int64 {
	return *o.count + 1
}

func work(orders []order, key int, done chan<- int64) {
	done <- total(&orders[key])
}

func main() {
	few := int64(3)
	far := (*int64)(unsafe.Pointer(uintptr(16)))
	orders := []order{{"none", &few}, {"apples", &few}, {"pears", far}}
	fmt.Println("crash: ready")
	var key int
	if _, err := fmt.Scan(&key); err != nil {
		panic(err)
	}
	done := make(chan int64)
	go work(orders, key, done)
	fmt.Println(<-done)
}

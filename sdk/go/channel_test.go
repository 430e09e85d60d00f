package agent

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"testing"
	"time"
)

// node answers all requests but those that wait.
func node(t *testing.T) *Channel {
	path := filepath.Join(t.TempDir(), "agent.sock")
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			connection, err := listener.Accept()
			if err != nil {
				return
			}
			go answerAll(connection)
		}
	}()
	return New(path)
}

func answerAll(connection net.Conn) {
	defer connection.Close()
	for {
		var asked struct {
			ID int64  `json:"id"`
			Op string `json:"op"`
		}
		if nextFrame(connection, &asked) != nil {
			return
		}
		if asked.Op == "await" {
			io.Copy(io.Discard, connection)
			return
		}
		body := fmt.Sprintf(`{"id":%d,"result":{}}`, asked.ID)
		frame := binary.BigEndian.AppendUint32(nil, uint32(len(body)))
		if _, err := connection.Write(append(frame, body...)); err != nil {
			return
		}
	}
}

func TestWhatIsCancelledEndsThoughItsConnectionIsThere(t *testing.T) {
	channel := node(t)
	for round := 0; round < 300; round++ {
		if _, err := channel.Hello(context.Background()); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		began := time.Now()
		if _, err := channel.Await(ctx, 1); !errors.Is(err, context.Canceled) {
			t.Fatalf("round %d: %v", round, err)
		}
		if time.Since(began) > margin/2 {
			t.Fatalf("round %d: it was not cancelled", round)
		}
	}
}

func TestACancellationAfterTheAnswerBreaksNothing(t *testing.T) {
	channel := node(t)
	if _, err := channel.Hello(context.Background()); err != nil {
		t.Fatal(err)
	}
	first := channel.connection
	for round := 0; round < 3000; round++ {
		ctx, cancel := context.WithCancel(context.Background())
		err := channel.Log(ctx, Action{Name: "fetch"})
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		if channel.connection != first {
			t.Fatalf("round %d: the connection was given up", round)
		}
	}
}

func TestNoTimeIsLeftToWaitForFeedback(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.sock")
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	go func() {
		connection, err := listener.Accept()
		if err != nil {
			return
		}
		defer connection.Close()
		for id := 1; ; id++ {
			var asked struct {
				WaitS float64 `json:"wait_s"`
			}
			if nextFrame(connection, &asked) != nil || asked.WaitS != 0 {
				return
			}
			body := fmt.Sprintf(`{"id":%d,"result":{"ready":false,"seq":1}}`, id)
			frame := binary.BigEndian.AppendUint32(nil, uint32(len(body)))
			connection.Write(append(frame, body...))
		}
	}()
	channel := New(path)
	channel.Patience = 0
	if _, came, err := channel.AwaitFor(context.Background(), 1, -time.Second); came || err != nil {
		t.Fatal(came, err)
	}
}

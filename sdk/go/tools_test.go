package agent

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"testing"
	"time"
)

// answering serves each connection with the frames that a test names, then hangs up; it
// sends on asked for each request.
func answering(t *testing.T, asked chan<- struct{}, frames ...string) *Channel {
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
			var request struct {
				ID int64 `json:"id"`
			}
			if nextFrame(connection, &request) == nil {
				for _, frame := range frames {
					body := fmt.Sprintf(frame, request.ID)
					length := binary.BigEndian.AppendUint32(nil, uint32(len(body)))
					connection.Write(append(length, body...))
				}
				asked <- struct{}{}
			}
			connection.Close()
		}
	}()
	return New(path)
}

func TestACallWhoseAnswerIsLostIsNotMadeAgain(t *testing.T) {
	asked := make(chan struct{}, 9)
	channel := answering(t, asked, `{"id":%d,"part":"aGFs"}`)
	_, err := channel.HTTP(context.Background(), HTTPRequest{URL: "http://x/"})
	var refusal *Error
	if !errors.As(err, &refusal) || refusal.Code != Unavailable || refusal.Retryable {
		t.Fatal(err)
	}
	if len(asked) != 1 {
		t.Fatalf("it was asked for %d times", len(asked))
	}
}

func TestARefusalThatMayPassIsLeftToTheCaller(t *testing.T) {
	asked := make(chan struct{}, 9)
	channel := answering(t, asked, `{"id":%d,"error":{"code":"exhausted","message":"m","retryable":true,`+
		`"retry_after_s":7,"details":{}}}`)
	_, err := channel.Complete(context.Background(), LLM, ModelRequest{Messages: []any{}})
	var refusal *Error
	if !errors.As(err, &refusal) || refusal.Code != Exhausted || refusal.RetryAfter != 7*time.Second {
		t.Fatal(err)
	}
	if <-asked; len(asked) != 0 {
		t.Fatal("it was asked for again")
	}
}

func TestPartsOfACallBeforeAreNoneOfThisOne(t *testing.T) {
	asked := make(chan struct{}, 9)
	channel := answering(t, asked, `{"id":0,"part":"b2xk","of":%d}`, `{"id":%d,"part":"bmU="}`,
		`{"id":%d,"part":"dw=="}`, `{"id":%d,"result":{"status":200,"url":"u","headers":[["a","b"]]}}`)
	response, err := channel.HTTP(context.Background(), HTTPRequest{Timeout: 1<<63 - 1})
	if err != nil || string(response.Body) != "new" || response.Headers.Get("A") != "b" {
		t.Fatal(response, err)
	}
}

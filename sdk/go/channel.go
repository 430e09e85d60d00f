// Package agent is an agent's way out of its sandbox: stages to the trainer, feedback back, steps
// to the behaviour log. docs/agent-protocol.md describes what it speaks.
package agent

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

const (
	// DefaultPath is where the node listens, in every sandbox.
	DefaultPath = "/run/dsec/agent.sock"
	// PayloadMaxBytes is the longest payload of a report, as JSON.
	PayloadMaxBytes = 256 * 1024

	requestMaxBytes = PayloadMaxBytes + 16*1024
	replyMaxBytes   = 4 * 1024 * 1024
	// One request waits so long for feedback at the node; then it is asked again.
	slice = 60 * time.Second
	// A node that has not answered so long after a request's own wait is asked again.
	margin     = 30 * time.Second
	firstPause = 50 * time.Millisecond
	lastPause  = 2 * time.Second
)

// About is who one is.
type About struct {
	Protocol  int    `json:"protocol"`
	SandboxID string `json:"sandbox_id"`
	// RolloutID is empty when the sandbox serves none.
	RolloutID string `json:"rollout_id"`
	// LastSeq is the number of the rollout's newest report; 0 when there is none.
	LastSeq int64 `json:"last_seq"`
	// Tools are those that the node calls for the sandbox.
	Tools           []string `json:"tools"`
	PayloadMaxBytes int      `json:"payload_max_bytes"`
	FrameMaxBytes   int      `json:"frame_max_bytes"`
}

// Feedback is the trainer's answer to a report.
type Feedback struct {
	Seq     int64           `json:"seq"`
	Payload json.RawMessage `json:"payload"`
	// Reward is nil when the trainer gave none.
	Reward *float64 `json:"reward"`
	// Done tells the agent to stop.
	Done bool `json:"done"`
}

// Action is one step of the behaviour log; who did it is known from the socket.
type Action struct {
	// Name is what was done, such as fetch_url.
	Name string
	// Status is how it ended; "ok" when it is empty.
	Status     string
	Latency    time.Duration
	TokensIn   int64
	TokensOut  int64
	Attributes map[string]string
}

// Channel is a connection to the sandbox's node. It connects when first used and again when it
// breaks: a request that got no answer is repeated with the same number, so a report counts once
// however often the platform's parts are restarted. Any goroutine may use it; requests go one
// after the other, so use another Channel for what must not wait for the trainer.
type Channel struct {
	// Patience is how long a request is repeated while the platform cannot take it.
	Patience time.Duration

	path       string
	outside    bool
	mutex      sync.Mutex
	connection net.Conn
	lastID     int64
	nextSeq    int64
}

// New returns a channel; nothing is connected yet. With an empty path it is what
// DSEC_AGENT_SOCKET names, else DefaultPath.
func New(path string) *Channel {
	if path == "" {
		path = os.Getenv("DSEC_AGENT_SOCKET")
	}
	if path == "" {
		path = DefaultPath
	}
	_, err := os.Stat(path)
	return &Channel{Patience: 2 * time.Minute, path: path, outside: os.IsNotExist(err)}
}

// Close closes the connection; a later request opens a new one.
func (c *Channel) Close() {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.drop()
}

// Hello says who one is and how far the rollout has come; the channel goes on after that.
func (c *Channel) Hello(ctx context.Context) (About, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	return c.hello(ctx)
}

// Report reports a stage and returns its number once it is durable; it waits for no feedback.
//
// Conflict when another process reports for the rollout, Invalid for a payload that is too large,
// Expired when the rollout is closed, NotFound when the sandbox serves none.
func (c *Channel) Report(ctx context.Context, stage string, payload any) (int64, error) {
	return c.ReportAs(ctx, 0, stage, payload)
}

// ReportAs reports a stage under a number; 0 takes the next one. The same number and content twice
// is one report; another content is a Conflict, a gap is Invalid and says which number is expected.
func (c *Channel) ReportAs(
	ctx context.Context, seq int64, stage string, payload any,
) (int64, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	seq, err := c.number(ctx, seq)
	if err != nil {
		return 0, err
	}
	request := map[string]any{"op": "report", "seq": seq, "stage": stage, "payload": payload}
	if err := c.ask(ctx, request, 0, nil); err != nil {
		return 0, err
	}
	c.counted(seq)
	return seq, nil
}

// Step reports a stage and waits for as long as the trainer takes for its feedback.
func (c *Channel) Step(ctx context.Context, stage string, payload any) (Feedback, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	seq, err := c.number(ctx, 0)
	if err != nil {
		return Feedback{}, err
	}
	request := map[string]any{"op": "step", "seq": seq, "stage": stage, "payload": payload}
	feedback, _, err := c.feedback(ctx, request, -1)
	if err == nil {
		c.counted(seq)
	}
	return feedback, err
}

// Await waits for the feedback to a report, for as long as it takes.
func (c *Channel) Await(ctx context.Context, seq int64) (Feedback, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	feedback, _, err := c.feedback(ctx, map[string]any{"op": "await", "seq": seq}, -1)
	return feedback, err
}

// AwaitFor waits so long for the feedback to a report, and returns whether it came. With no time left
// it asks once.
func (c *Channel) AwaitFor(
	ctx context.Context, seq int64, wait time.Duration,
) (Feedback, bool, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if wait < 0 {
		wait = 0
	}
	return c.feedback(ctx, map[string]any{"op": "await", "seq": seq}, wait)
}

// Log writes one step of the behaviour log. Actions that the platform writes itself are Denied.
func (c *Channel) Log(ctx context.Context, action Action) error {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	status, attributes := action.Status, action.Attributes
	if status == "" {
		status = "ok"
	}
	if attributes == nil {
		attributes = map[string]string{}
	}
	return c.ask(ctx, map[string]any{
		"op":         "log",
		"action":     action.Name,
		"status":     status,
		"latency_ms": float64(action.Latency) / float64(time.Millisecond),
		"tokens_in":  action.TokensIn,
		"tokens_out": action.TokensOut,
		"attributes": attributes,
	}, 0, nil)
}

// --- Asking, and asking again ---

func (c *Channel) hello(ctx context.Context) (About, error) {
	var about About
	if err := c.ask(ctx, map[string]any{"op": "hello"}, 0, &about); err != nil {
		return About{}, err
	}
	c.nextSeq = about.LastSeq + 1
	return about, nil
}

func (c *Channel) number(ctx context.Context, seq int64) (int64, error) {
	if seq != 0 {
		return seq, nil
	}
	if c.nextSeq == 0 {
		if _, err := c.hello(ctx); err != nil {
			return 0, err
		}
	}
	return c.nextSeq, nil
}

func (c *Channel) counted(seq int64) {
	if seq >= c.nextSeq {
		c.nextSeq = seq + 1
	}
}

// feedback asks until there is some, or until wait is over; a negative one is never over.
func (c *Channel) feedback(
	ctx context.Context, request map[string]any, wait time.Duration,
) (Feedback, bool, error) {
	until := time.Now().Add(wait)
	for {
		left := slice
		if wait >= 0 && time.Until(until) < left {
			left = time.Until(until)
		}
		if left < 0 {
			left = 0
		}
		request["wait_s"] = left.Seconds()
		var answer struct {
			Ready bool `json:"ready"`
			Feedback
		}
		if err := c.ask(ctx, request, left, &answer); err != nil {
			return Feedback{}, false, err
		}
		if answer.Ready {
			return answer.Feedback, true, nil
		}
		if wait >= 0 && time.Now().After(until) {
			return Feedback{}, false, nil
		}
	}
}

// ask puts the result of one request, repeated while it can help, into result.
func (c *Channel) ask(
	ctx context.Context, request map[string]any, wait time.Duration, result any,
) error {
	body, err := encoded(request)
	if err != nil {
		return err
	}
	giveUpAt := time.Now().Add(wait + c.Patience)
	pause := firstPause
	for {
		raw, err := c.askOnce(ctx, body, wait+margin, nil)
		if err == nil {
			if result == nil {
				return nil
			}
			return json.Unmarshal(raw, result)
		}
		if ctx.Err() != nil {
			c.drop()
			return ctx.Err()
		}
		late := time.Now().After(giveUpAt)
		next := pause
		var refusal *Error
		if errors.As(err, &refusal) {
			if !refusal.Retryable || late {
				return refusal
			}
			if refusal.RetryAfter > 0 {
				next = refusal.RetryAfter
			}
		} else {
			c.drop()
			if late {
				return &Error{Code: Unavailable, Retryable: true, Message: fmt.Sprintf(
					"no answer on %s (%v); is this a sandbox, and is its node's daemon running?",
					c.path, err,
				)}
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(next):
		}
		if pause *= 2; pause > lastPause {
			pause = lastPause
		}
	}
}

// askOnce returns the result of one request; what comes before it is appended to parts.
func (c *Channel) askOnce(
	ctx context.Context, body []byte, timeout time.Duration, parts *[]byte,
) (json.RawMessage, error) {
	if c.connection == nil {
		dialer := net.Dialer{Timeout: margin}
		connection, err := dialer.DialContext(ctx, "unix", c.path)
		if err != nil {
			return nil, err
		}
		c.connection = connection
	}
	connection := c.connection
	if err := connection.SetDeadline(time.Now().Add(timeout)); err != nil {
		return nil, err
	}
	answered, over := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(over)
		select {
		case <-ctx.Done():
			connection.SetDeadline(time.Now())
		case <-answered:
		}
	}()
	// It is waited for, or it might end the next request when this one's context is cancelled.
	defer func() {
		close(answered)
		<-over
	}()
	c.lastID++
	head := []byte(fmt.Sprintf(`{"id":%d,`, c.lastID))
	frame := binary.BigEndian.AppendUint32(nil, uint32(len(head)+len(body)-1))
	frame = append(append(frame, head...), body[1:]...)
	if _, err := connection.Write(frame); err != nil {
		return nil, err
	}
	for {
		var reply struct {
			ID     *int64          `json:"id"`
			Part   []byte          `json:"part"`
			Result json.RawMessage `json:"result"`
			Error  *told           `json:"error"`
		}
		if err := nextFrame(connection, &reply); err != nil {
			return nil, err
		}
		if reply.Part != nil {
			if parts != nil && reply.ID != nil && *reply.ID == c.lastID {
				*parts = append(*parts, reply.Part...)
			}
			continue
		}
		// An answer to an earlier request, given up long ago, is passed over.
		if reply.ID == nil && reply.Error != nil || reply.ID != nil && *reply.ID == c.lastID {
			if reply.Error != nil {
				return nil, reply.Error.error()
			}
			return reply.Result, nil
		}
	}
}

func (c *Channel) drop() {
	if c.connection != nil {
		c.connection.Close()
		c.connection = nil
	}
}

func nextFrame(source io.Reader, reply any) error {
	var header [4]byte
	if _, err := io.ReadFull(source, header[:]); err != nil {
		return err
	}
	length := binary.BigEndian.Uint32(header[:])
	if length > replyMaxBytes {
		return fmt.Errorf("the peer announced a frame of %d bytes", length)
	}
	body := make([]byte, length)
	if _, err := io.ReadFull(source, body); err != nil {
		return err
	}
	return json.Unmarshal(body, reply)
}

func encoded(request map[string]any) ([]byte, error) {
	body, err := compactJSON(request)
	if err != nil {
		return nil, invalid("this is no JSON: %v", err)
	}
	if len(body) > requestMaxBytes {
		return nil, invalid(
			"a request of %d bytes: at most %d bytes of payload may be sent; put larger data into "+
				"a file of the sandbox and report its path", len(body), PayloadMaxBytes,
		)
	}
	return body, nil
}

// compactJSON returns JSON without white space or escapes for HTML, the names of maps sorted.
func compactJSON(value any) ([]byte, error) {
	var buffer bytes.Buffer
	encoder := json.NewEncoder(&buffer)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(value); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(buffer.Bytes(), []byte("\n")), nil
}

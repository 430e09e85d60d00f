package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/textproto"
	"time"
)

// The tools that a node calls for its sandboxes; About.Tools says which it calls for this one.
const (
	HTTPClient    = "http_client"
	LLM           = "llm"
	LLMSummarizer = "llm_summarizer"
)

const (
	httpTimeout  = 30 * time.Second
	modelTimeout = 10 * time.Minute
	// No call takes longer at the node.
	longestCall = 10 * time.Minute
)

// Answer is what came of a tool's call that the node made.
type Answer struct {
	// Result is an object, as docs/agent-protocol.md has it for the tool.
	Result json.RawMessage
	Body   []byte
}

// HTTPRequest is a request that the node makes.
type HTTPRequest struct {
	URL string
	// Method is GET when it is empty.
	Method  string
	Headers map[string]string
	// Body has at most 190 KiB.
	Body []byte
	// Timeout is for all of it, redirects included; 30 seconds when it is 0, at most 5 minutes.
	Timeout time.Duration
}

// HTTPResponse is an answer, whatever its status.
type HTTPResponse struct {
	Status int
	// URL is where it came from, after redirects.
	URL     string
	Headers textproto.MIMEHeader
	Body    []byte
}

// ModelRequest is what a model is asked. What is left out is the contract's.
type ModelRequest struct {
	// Messages are those of chat completions, such as a slice of maps; there has to be one.
	Messages any
	Model    string
	// MaxTokens is the contract's when it is 0.
	MaxTokens int
	// Temperature is the contract's when it is nil.
	Temperature *float64
	LogProbs    bool
	TopLogProbs int
	// Options are further fields of the request, of those that docs/agent-protocol.md names.
	Options map[string]any
	// Timeout is 10 minutes when it is 0, and at most that.
	Timeout time.Duration
}

// Completion is what a model wrote.
type Completion struct {
	Model     string
	TokensIn  int64
	TokensOut int64
	// Body is the chat completion, as the model server has it.
	Body json.RawMessage
}

// AskTool has the node make a call of a tool, with arguments as docs/agent-protocol.md has them, and
// waits so long for it, and half a minute. HTTP and Complete are the same with types.
//
// It is asked for once, whatever Patience is: what became of a call whose answer is lost is not known.
// The node writes the step of the behaviour log, so it does not belong into CallTool. Other requests
// of this channel wait until it is over.
//
// Denied for what the contract does not grant, Exhausted, with RetryAfter, for what it grants no more
// of for now, Unsupported for a tool that the node does not run, Unavailable when the answer is lost,
// and the tool's own errors. A cancelled call returns the error of ctx; it may have been made.
func (c *Channel) AskTool(
	ctx context.Context, tool, call string, arguments any, wait time.Duration,
) (Answer, error) {
	body, err := encoded(map[string]any{
		"op": "tool", "tool": tool, "call": call, "arguments": arguments,
	})
	if err != nil {
		return Answer{}, err
	}
	if wait < 0 {
		wait = 0
	} else if wait > longestCall {
		wait = longestCall
	}
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if ctx.Err() != nil {
		return Answer{}, ctx.Err()
	}
	var parts []byte
	result, err := c.askOnce(ctx, body, wait+margin, &parts)
	if err == nil {
		return Answer{Result: result, Body: parts}, nil
	}
	var refusal *Error
	if errors.As(err, &refusal) {
		return Answer{}, refusal
	}
	c.drop()
	if ctx.Err() != nil {
		return Answer{}, ctx.Err()
	}
	return Answer{}, &Error{Code: Unavailable, Message: fmt.Sprintf(
		"the node's answer was lost (%v); the call may have been made", err,
	)}
}

// HTTP has the node make a request; the sandbox needs no network for it. Errors are those of AskTool,
// and Invalid for what is no request, Timeout when the answer is not whole in time, Exhausted when it
// is longer than 16 MiB. A status of any kind is an answer and no error.
func (c *Channel) HTTP(ctx context.Context, request HTTPRequest) (HTTPResponse, error) {
	method, timeout := request.Method, request.Timeout
	if method == "" {
		method = "GET"
	}
	if timeout == 0 {
		timeout = httpTimeout
	}
	arguments := map[string]any{
		"url": request.URL, "method": method, "timeout_s": timeout.Seconds(),
	}
	if request.Headers != nil {
		arguments["headers"] = request.Headers
	}
	if request.Body != nil {
		arguments["body"] = request.Body
	}
	answer, err := c.AskTool(ctx, HTTPClient, "request", arguments, timeout)
	if err != nil {
		return HTTPResponse{}, err
	}
	var told struct {
		Status  int         `json:"status"`
		URL     string      `json:"url"`
		Headers [][2]string `json:"headers"`
	}
	if err := understood(answer.Result, &told); err != nil {
		return HTTPResponse{}, err
	}
	headers := textproto.MIMEHeader{}
	for _, header := range told.Headers {
		headers.Add(header[0], header[1])
	}
	return HTTPResponse{told.Status, told.URL, headers, answer.Body}, nil
}

// Complete has the node ask its model by a tool, LLM or LLMSummarizer. Errors are those of AskTool,
// and Denied for another model or more tokens than the contract's, Invalid for what is no request.
func (c *Channel) Complete(
	ctx context.Context, tool string, request ModelRequest,
) (Completion, error) {
	timeout := request.Timeout
	if timeout == 0 {
		timeout = modelTimeout
	}
	arguments := map[string]any{
		"messages":     request.Messages,
		"model":        request.Model,
		"logprobs":     request.LogProbs,
		"top_logprobs": request.TopLogProbs,
		"timeout_s":    timeout.Seconds(),
	}
	if request.MaxTokens != 0 {
		arguments["max_tokens"] = request.MaxTokens
	}
	if request.Temperature != nil {
		arguments["temperature"] = *request.Temperature
	}
	if request.Options != nil {
		arguments["options"] = request.Options
	}
	answer, err := c.AskTool(ctx, tool, "complete", arguments, timeout)
	if err != nil {
		return Completion{}, err
	}
	var told struct {
		Model     string `json:"model"`
		TokensIn  int64  `json:"tokens_in"`
		TokensOut int64  `json:"tokens_out"`
	}
	if err := understood(answer.Result, &told); err != nil {
		return Completion{}, err
	}
	var completion json.RawMessage
	if err := understood(answer.Body, &completion); err != nil {
		return Completion{}, err
	}
	return Completion{told.Model, told.TokensIn, told.TokensOut, completion}, nil
}

func understood(result json.RawMessage, told any) error {
	if err := json.Unmarshal(result, told); err != nil {
		return &Error{Code: Internal, Message: fmt.Sprintf("the node's answer is odd: %v", err)}
	}
	return nil
}

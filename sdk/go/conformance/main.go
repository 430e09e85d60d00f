// The program that the conformance suite drives: requests as lines of JSON in, results out.
package main

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"dsec/agent"
)

type request struct {
	Op         string            `json:"op"`
	Seq        int64             `json:"seq"`
	Stage      string            `json:"stage"`
	Payload    json.RawMessage   `json:"payload"`
	WaitS      float64           `json:"wait_s"`
	Action     string            `json:"action"`
	Status     string            `json:"status"`
	LatencyMS  float64           `json:"latency_ms"`
	TokensIn   int64             `json:"tokens_in"`
	TokensOut  int64             `json:"tokens_out"`
	Attributes map[string]string `json:"attributes"`
	Tool       string            `json:"tool"`
	Method     string            `json:"method"`
	Arguments  map[string]any    `json:"arguments"`
	Fails      string            `json:"fails"`
	Call       string            `json:"call"`
	URL        string            `json:"url"`
	Headers    map[string]string `json:"headers"`
	Body       string            `json:"body"`
	Messages   json.RawMessage   `json:"messages"`
	MaxTokens  int               `json:"max_tokens"`
	Options    map[string]any    `json:"options"`
}

func main() {
	ctx := context.Background()
	channel := agent.New("")
	defer channel.Close()
	if len(os.Args) > 1 && os.Args[1] == "serve" {
		if err := agent.Serve(ctx, channel, adder()); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<22)
	for lines.Scan() {
		var asked request
		if err := json.Unmarshal(lines.Bytes(), &asked); err != nil {
			panic(err)
		}
		result, err := answer(ctx, channel, asked)
		said := map[string]any{"result": result}
		if err != nil {
			known := err.(*agent.Error)
			details := known.Details
			if details == nil {
				details = map[string]any{}
			}
			said = map[string]any{"error": map[string]any{
				"code": known.Code, "retryable": known.Retryable, "details": details,
			}}
		}
		body, err := json.Marshal(said)
		if err != nil {
			panic(err)
		}
		fmt.Println(string(body))
	}
}

func answer(ctx context.Context, channel *agent.Channel, asked request) (any, error) {
	switch asked.Op {
	case "patience":
		channel.Patience = time.Duration(asked.WaitS * float64(time.Second))
		return nil, nil
	case "hello":
		about, err := channel.Hello(ctx)
		return about, err
	case "report":
		return channel.ReportAs(ctx, asked.Seq, asked.Stage, asked.Payload)
	case "step":
		return channel.Step(ctx, asked.Stage, asked.Payload)
	case "await":
		wait := time.Duration(asked.WaitS * float64(time.Second))
		feedback, ready, err := channel.AwaitFor(ctx, asked.Seq, wait)
		if err != nil || !ready {
			return nil, err
		}
		return feedback, nil
	case "log":
		return nil, channel.Log(ctx, agent.Action{
			Name:       asked.Action,
			Status:     asked.Status,
			Latency:    time.Duration(asked.LatencyMS * float64(time.Millisecond)),
			TokensIn:   asked.TokensIn,
			TokensOut:  asked.TokensOut,
			Attributes: asked.Attributes,
		})
	case "call":
		return nil, channel.CallTool(ctx, asked.Tool, asked.Method, asked.Arguments,
			func(_ context.Context, call *agent.Call) error {
				if asked.Fails != "" {
					return &agent.Error{Code: asked.Fails, Message: "as it was told"}
				}
				call.Status, call.TokensIn, call.TokensOut = asked.Status, asked.TokensIn, asked.TokensOut
				call.Notes = asked.Attributes
				return nil
			})
	case "tool":
		answer, err := channel.AskTool(ctx, asked.Tool, asked.Call, asked.Arguments, time.Second)
		return answer.Result, err
	case "http":
		response, err := channel.HTTP(ctx, agent.HTTPRequest{
			URL: asked.URL, Method: asked.Method, Headers: asked.Headers, Body: []byte(asked.Body),
		})
		if err != nil {
			return nil, err
		}
		sum := sha256.Sum256(response.Body)
		return map[string]any{
			"status": response.Status, "url": response.URL, "x_site": response.Headers["X-Site"],
			"bytes": len(response.Body), "sha256": hex.EncodeToString(sum[:]),
		}, nil
	case "complete":
		completion, err := channel.Complete(ctx, asked.Tool, agent.ModelRequest{
			Messages: asked.Messages, MaxTokens: asked.MaxTokens, Options: asked.Options,
		})
		if err != nil {
			return nil, err
		}
		return map[string]any{
			"model": completion.Model, "tokens_in": completion.TokensIn,
			"tokens_out": completion.TokensOut, "body": completion.Body,
		}, nil
	}
	panic("no such op: " + asked.Op)
}

func adder() agent.Agent {
	return agent.Agent{
		Name:      "adder",
		Version:   "2",
		Arguments: []string{"a", "b"},
		Execute: func(_ context.Context, input json.RawMessage) (any, error) {
			var given struct {
				A *int64 `json:"a"`
				B int64  `json:"b"`
			}
			if err := json.Unmarshal(input, &given); err != nil || given.A == nil {
				return nil, &agent.Error{Code: agent.Invalid, Message: "give a and b"}
			}
			if *given.A == 7 {
				return string(make([]byte, 300_000)), nil
			}
			if *given.A == 8 {
				panic("eight")
			}
			return *given.A + given.B, nil
		},
	}
}

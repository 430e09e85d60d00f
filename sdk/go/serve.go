package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
)

// Agent is what Serve serves.
type Agent struct {
	Name    string
	Version string
	// Arguments are the names of what Execute takes, for the trainer.
	Arguments []string
	// Execute does the work for an input and returns an output, which is written as JSON.
	Execute func(ctx context.Context, input json.RawMessage) (any, error)
}

// Serve takes work and does it. In a sandbox that serves a rollout it works for the trainer until
// that says done or closes the rollout; otherwise it reads one input from standard input as JSON and
// prints the output, as a step of a DAG does.
//
// What was under way when an earlier process died is never begun again by itself: the trainer is
// told by the stage "restarted", and says what to do.
func Serve(ctx context.Context, channel *Channel, agent Agent) error {
	var about About
	if !channel.outside {
		var err error
		if about, err = channel.Hello(ctx); err != nil {
			return err
		}
	}
	if about.RolloutID == "" {
		return once(ctx, agent, os.Stdin, os.Stdout)
	}
	err := rollout(ctx, channel, agent, about)
	if CodeOf(err) == Expired {
		return nil
	}
	return err
}

func rollout(ctx context.Context, channel *Channel, agent Agent, about About) error {
	arguments := agent.Arguments
	if arguments == nil {
		arguments = []string{}
	}
	said := map[string]any{
		"agent": agent.Name, "version": agent.Version, "arguments": arguments,
	}
	stage := "ready"
	if about.LastSeq > 0 {
		stage, said["last_seq"] = "restarted", about.LastSeq
	}
	seq, err := channel.Report(ctx, stage, said)
	for err == nil {
		var feedback Feedback
		if feedback, err = channel.Await(ctx, seq); err != nil || feedback.Done {
			return err
		}
		output, failure := work(ctx, agent, feedback.Payload)
		if failure == nil {
			seq, err = channel.Report(ctx, "result", map[string]any{"output": output})
			if CodeOf(err) != Invalid {
				continue
			}
			failure = err // what was returned is too much for a report, or no JSON
		}
		seq, err = channel.Report(ctx, "failed", map[string]any{"error": toldOf(failure)})
	}
	return err
}

func work(ctx context.Context, agent Agent, input json.RawMessage) (output any, err error) {
	defer func() {
		if panicked := recover(); panicked != nil {
			err = &Error{Code: Internal, Message: fmt.Sprintf("panic: %v", panicked)}
		}
	}()
	return agent.Execute(ctx, input)
}

func once(ctx context.Context, agent Agent, source io.Reader, sink io.Writer) error {
	text, err := io.ReadAll(source)
	if err != nil {
		return err
	}
	if len(bytes.TrimSpace(text)) == 0 {
		text = []byte("null")
	}
	if !json.Valid(text) {
		return invalid("the input is no JSON")
	}
	output, err := work(ctx, agent, text)
	if err != nil {
		return err
	}
	body, err := compactJSON(output)
	if err != nil {
		return invalid("what execute returned is no JSON: %v", err)
	}
	_, err = fmt.Fprintf(sink, "%s\n", body)
	return err
}

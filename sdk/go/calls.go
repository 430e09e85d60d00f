package agent

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"time"
)

// Call is a tool's call that runs; what is set of it becomes part of its step in the behaviour log.
type Call struct {
	Tool      string
	Method    string
	Arguments map[string]any

	// Status is how it ended: "ok" when it is empty, and the error's code when it failed.
	Status    string
	TokensIn  int64
	TokensOut int64
	// Notes are its own particulars.
	Notes map[string]string
}

// ArgumentsSHA256 returns the SHA-256 of arguments as JSON, in hexadecimal digits: names sorted, no
// white space, no escapes that JSON does not need.
func ArgumentsSHA256(arguments map[string]any) (string, error) {
	if arguments == nil {
		arguments = map[string]any{}
	}
	body, err := compactJSON(arguments)
	if err != nil {
		return "", invalid("the arguments are no JSON: %v", err)
	}
	// Read and written again, the fields of structs are sorted, too.
	decoder := json.NewDecoder(bytes.NewReader(body))
	decoder.UseNumber()
	var plain any
	if err := decoder.Decode(&plain); err != nil {
		return "", invalid("the arguments are no JSON: %v", err)
	}
	if body, err = compactJSON(plain); err != nil {
		return "", invalid("the arguments are no JSON: %v", err)
	}
	digest := sha256.Sum256(unescaped(body))
	return hex.EncodeToString(digest[:]), nil
}

// What encoding/json escapes and JSON need not, and what its older versions write otherwise.
var escapes = map[string]string{
	`\u2028`: "\u2028", `\u2029`: "\u2029", `\u0008`: `\b`, `\u000c`: `\f`,
}

func unescaped(body []byte) []byte {
	plain := make([]byte, 0, len(body))
	for len(body) > 0 {
		length := 1
		if body[0] == '\\' {
			length = 2
			if body[1] == 'u' {
				length = 6
			}
		}
		if shorter, known := escapes[string(body[:length])]; known {
			plain = append(plain, shorter...)
		} else {
			plain = append(plain, body[:length]...)
		}
		body = body[length:]
	}
	return plain
}

// CallTool runs work as a tool's call and writes a step of the behaviour log when it is over, named
// tool.method, with the hash of the arguments, the status and the latency. Outside of a sandbox, where
// there was no socket when the channel was made, there is no log.
//
// It returns the error of work, or else that of the log.
func (c *Channel) CallTool(
	ctx context.Context,
	tool, method string,
	arguments map[string]any,
	work func(ctx context.Context, call *Call) error,
) error {
	hash, err := ArgumentsSHA256(arguments)
	if err != nil {
		return err
	}
	call := &Call{Tool: tool, Method: method, Arguments: arguments}
	began := time.Now()
	failure := work(ctx, call)
	if c.outside {
		return failure
	}
	attributes := map[string]string{"arguments_sha256": hash}
	for name, value := range call.Notes {
		attributes[name] = value
	}
	status := call.Status
	if failure != nil {
		known := asError(failure)
		status, attributes["error"] = known.Code, known.Message
	}
	unsaid := c.Log(ctx, Action{
		Name:       tool + "." + method,
		Status:     status,
		Latency:    time.Since(began),
		TokensIn:   call.TokensIn,
		TokensOut:  call.TokensOut,
		Attributes: attributes,
	})
	if failure != nil {
		return failure
	}
	return unsaid
}

package agent

import (
	"errors"
	"fmt"
	"time"
)

// The codes of errors. The set is closed: programs may branch on them.
const (
	Invalid        = "invalid"
	NotFound       = "not_found"
	Conflict       = "conflict"
	Exhausted      = "exhausted"
	Unavailable    = "unavailable"
	Denied         = "denied"
	Timeout        = "timeout"
	CommandTimeout = "command_timeout"
	OOM            = "oom"
	LayerError     = "layer_error"
	Expired        = "expired"
	Unsupported    = "unsupported"
	Internal       = "internal"
)

// Error is a refusal of the platform, or says that it was not there.
type Error struct {
	// Code is one of the platform's error codes.
	Code string
	// Message says what failed and what to do, for people.
	Message string
	// Retryable says whether the same request may succeed later.
	Retryable bool
	// RetryAfter is how long to wait before that; 0 leaves it to the caller.
	RetryAfter time.Duration
	// Details are flat facts for programs, such as expected_seq.
	Details map[string]any
}

// Error returns the code and the message.
func (e *Error) Error() string {
	return e.Code + ": " + e.Message
}

// CodeOf returns the code of an error of the platform, Internal for any other, "" for nil.
func CodeOf(err error) string {
	if err == nil {
		return ""
	}
	return asError(err).Code
}

func asError(err error) *Error {
	var known *Error
	if errors.As(err, &known) {
		return known
	}
	return &Error{Code: Internal, Message: err.Error()}
}

func invalid(format string, values ...any) *Error {
	return &Error{Code: Invalid, Message: fmt.Sprintf(format, values...)}
}

// told is an error as it is written on the socket and in reports.
type told struct {
	Code        string         `json:"code"`
	Message     string         `json:"message"`
	Retryable   bool           `json:"retryable"`
	RetryAfterS float64        `json:"retry_after_s"`
	Details     map[string]any `json:"details"`
}

func (t *told) error() *Error {
	return &Error{
		Code:       t.Code,
		Message:    t.Message,
		Retryable:  t.Retryable,
		RetryAfter: time.Duration(t.RetryAfterS * float64(time.Second)),
		Details:    t.Details,
	}
}

func toldOf(err error) told {
	known := asError(err)
	details := known.Details
	if details == nil {
		details = map[string]any{}
	}
	return told{known.Code, known.Message, known.Retryable, known.RetryAfter.Seconds(), details}
}

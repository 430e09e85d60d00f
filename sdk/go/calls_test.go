package agent

import "testing"

func TestArgumentsHaveOneHashHoweverTheyAreWritten(t *testing.T) {
	type place struct {
		Zip  string `json:"zip"`
		City string `json:"city"`
	}
	odd := "<&>\u2028\u2029\b\f\\u2028\x7f"
	written, err := ArgumentsSHA256(map[string]any{"at": place{"1", odd}, "n": 3})
	if err != nil {
		t.Fatal(err)
	}
	same, err := ArgumentsSHA256(map[string]any{
		"n": int64(3), "at": map[string]any{"zip": "1", "city": odd},
	})
	if err != nil || same != written {
		t.Fatal(same, err)
	}
	// As Python's SDK has it.
	if want := "8c6dbe095d06031e7f7268d622e389e41bf867dcae9a19543fb64aec804911af"; written != want {
		t.Fatalf("%s, not %s", written, want)
	}
}

"""A harness in a sandbox, played by verl's own worker: the tokens are those of its servers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed: dsec[verl]")

from documents import ROOT
from dsec import DsecError, ErrorCode
from dsec.model_relay import ModelRequest
from dsec_common.model_errors import ModelApi, ModelCallError
from stack import Stack

pytestmark = pytest.mark.filterwarnings("default")
EXAMPLES = ROOT / "examples" / "verl"


def _call(command: str) -> str:
    call = {"name": "shell", "arguments": {"command": command}}
    return f"So:\n<tool_call>{json.dumps(call)}</tool_call>"


def _counts(prompt: str) -> str:
    """Look, count, and be done; the second row guesses."""
    turn = prompt.count("<|im_start|>assistant")
    if "guess" in prompt:
        return _call("echo 0 > answer") if turn == 1 else "Guessed."
    return [_call("ls"), _call("sort -u app.log | wc -l > answer"), "Counted."][turn - 1]


@pytest.fixture
def world() -> Any:
    """Imported here, where its libraries may warn."""
    import verl_world  # noqa: PLC0415  see above

    return verl_world


@pytest.fixture
def platform(stack: Stack, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("DSEC_BASE", base)
    monkeypatch.setenv("DSEC_NATS_SERVERS", ",".join(stack.context.nats_servers))
    monkeypatch.setenv("DSEC_NATS_CREDENTIALS", stack.context.credentials)


def _row(content: str, seed: int = 1) -> dict[str, Any]:
    prompt = [{"role": "user", "content": content}]
    return {"agent_name": "count_lines", "raw_prompt": prompt, "seed": seed, "index": seed}


def _texts(tokenizer: Any, ids: Any, mask: Any, wanted: int) -> list[str]:
    """Return the stretches of tokens that a mask has, or has not."""
    found: list[list[int]] = []
    before = None
    for token, at in zip(ids, mask, strict=True):
        if at == wanted:
            if before != wanted:
                found.append([])
            found[-1].append(int(token))
        before = at
    return [tokenizer.decode(it) for it in found]


@pytest.mark.usefixtures("platform")
async def test_what_a_harness_called_becomes_rows_of_the_servers_own_tokens(
    world: Any, tmp_path: Path
) -> None:
    tokenizer = world.make_model(tmp_path)
    config = world.configured(tmp_path, EXAMPLES / "agent_loops.yaml")
    servers = world.ScriptedServers(config, tokenizer, _counts)
    rows = [_row("Count the distinct lines of app.log into answer."), _row("guess", seed=2)]
    batch = await world.worker_of(config, servers).generate_sequences(world.batch_of(rows))

    counted, guessed = (int(it) for it in batch.batch["attention_mask"][:, 1024:].sum(1))
    ids = batch.batch["responses"][0][:counted]
    mask = batch.batch["response_mask"][0][:counted].tolist()
    assert _texts(tokenizer, ids, mask, 1) == [
        _call("ls") + "<|im_end|>",
        _call("sort -u app.log | wc -l > answer") + "<|im_end|>",
        "Counted.<|im_end|>",
    ]
    told, nothing = _texts(tokenizer, ids, mask, 0)
    assert told == "\n<|im_start|>tool\napp.log\n<|im_end|>\n<|im_start|>assistant\n"
    assert "tool\n<|im_end|>" in nothing
    # Log-probabilities as they were sampled, and of nothing else.
    logprobs = batch.batch["rollout_log_probs"][0][:counted]
    assert [round(float(it) * -1000) for it in logprobs] == [
        int(it) * at for it, at in zip(ids, mask, strict=True)
    ]
    # What each call was given is, token by token, what is trained on.
    whole = batch.batch["input_ids"][0][batch.batch["attention_mask"][0] == 1].tolist()
    asked = [prompt for prompt, _ in servers.asked if "guess" not in tokenizer.decode(prompt)]
    assert [whole[: len(it)] for it in asked] == asked
    scores = batch.batch["rm_scores"]
    assert (float(scores[0][counted - 1]), float(scores.sum())) == (1.0, 1.0)
    about = batch.non_tensor_batch
    assert about["__num_turns__"].tolist() == [6, 4]
    assert about["finish_reasons"][0] == ["tool_calls", "tool_calls", "stop"]
    assert 0 < guessed < counted
    assert {it["temperature"] for _, it in servers.asked} == {1.0}


@pytest.mark.usefixtures("platform")
async def test_no_row_is_longer_than_verl_takes_and_one_without_a_call_trains_nothing(
    world: Any, tmp_path: Path
) -> None:
    tokenizer = world.make_model(tmp_path)
    length = "actor_rollout_ref.rollout.response_length"
    config = world.configured(tmp_path, EXAMPLES / "agent_loops.yaml", f"{length}=100")
    servers = world.ScriptedServers(config, tokenizer, lambda _: _call("seq 1000"))
    rows = [_row("Count."), _row("x" * 1000, seed=2)]
    batch = await world.worker_of(config, servers).generate_sequences(world.batch_of(rows))
    sampled = batch.batch["response_mask"].sum(1).tolist()
    # The second call of the first row, and the first of the second, were refused.
    assert [len(servers.asked), sampled[1]] == [1, 0]
    assert 50 < sampled[0] <= 100
    assert batch.non_tensor_batch["finish_reasons"].tolist() == [["tool_calls"], []]
    assert float(batch.batch["rm_scores"].sum()) == 0.0


def _forgetful(prompt: str) -> str:
    """Let the harness forget what it said, as one does that asks a sub-agent."""
    return "Short." if "app.log" in prompt else "Said at some length."


@pytest.mark.usefixtures("platform")
async def test_a_trainer_that_takes_them_is_given_all_sequences_of_a_rollout(
    world: Any, tmp_path: Path
) -> None:
    from examples.verl.count_loop import CountLines  # noqa: PLC0415  its libraries may warn

    class Twice(CountLines):
        """The harness, run again with another prompt: two sequences."""

        def harness(self, row: Any) -> Any:
            run = super().harness(row)
            return replace(run, command=f"{run.command}; python3 /opt/agent.py 'Once more.'")

    tokenizer = world.make_model(tmp_path)
    config = world.configured(tmp_path, EXAMPLES / "agent_loops.yaml", "trainer.use_v1=true")
    servers = world.ScriptedServers(config, tokenizer, _forgetful)
    loop = world.loop_of(Twice, config, servers)
    short, main = await loop.run({"temperature": 1.0}, **_row("Count app.log."))
    said = [tokenizer.decode(it.as_dict()["responses"]) for it in (short, main)]
    assert said == ["Short.<|im_end|>", "Said at some length.<|im_end|>"]
    assert [it.reward_score for it in (short, main)] == [0.0, 0.0]
    assert (short.extra_fields["min_global_steps"], main.extra_fields["max_global_steps"]) == (1, 2)


@pytest.mark.usefixtures("platform")
async def test_what_the_platform_fails_at_is_begun_anew_and_what_cannot_be_trained_on_is_told(
    world: Any, tmp_path: Path
) -> None:
    from examples.verl.count_loop import CountLines  # noqa: PLC0415  its libraries may warn

    made: list[str] = []

    class Losing(CountLines):
        """Its first sandbox is gone when the harness is to run."""

        def harness(self, row: Any) -> Any:
            run = super().harness(row)
            prepare = run.task.prepare
            assert prepare is not None

            async def losing(sandbox: Any, seed: int) -> None:
                made.append(sandbox.id)
                await prepare(sandbox, seed)
                if len(made) == 1:
                    await sandbox.delete()

            return replace(run, task=replace(run.task, prepare=losing))

    tokenizer = world.make_model(tmp_path)
    config = world.configured(tmp_path, EXAMPLES / "agent_loops.yaml")
    servers = world.ScriptedServers(config, tokenizer, _counts)
    row = _row("Count the distinct lines of app.log into answer.")
    output = await world.loop_of(Losing, config, servers).run({}, **row)
    assert (output.reward_score, len(made), len(servers.asked)) == (1.0, 2, 3)

    servers.silent = True
    with pytest.raises(DsecError) as told:
        await world.loop_of(Losing, config, servers).run({}, **row)
    assert (told.value.code, len(made)) == (ErrorCode.UNSUPPORTED, 3)


async def test_what_an_engine_is_asked_is_held_to_or_refused(world: Any, tmp_path: Path) -> None:
    tokenizer = world.make_model(tmp_path)
    config = world.configured(tmp_path, EXAMPLES / "agent_loops.yaml")
    servers = world.ScriptedServers(config, tokenizer, lambda _: "As you like.")
    engine = world.engine_of(config, servers)
    said = ({"role": "user", "content": [{"type": "text", "text": "Say it."}]},)

    def asked(messages: Any = said, **options: Any) -> ModelRequest:
        return ModelRequest(api=ModelApi.CHAT, model="any", messages=messages, options=options)

    for name, value in (("stop", ["x"]), ("tool_choice", "required"), ("response_format", {})):
        with pytest.raises(ModelCallError, match=name) as refused:
            await engine(asked(**{name: value}))
        assert refused.value.status == 400
    short = await engine(asked(max_tokens=3, temperature=0.2, tool_choice="auto"))
    assert (short.answer.content, short.answer.finish_reason) == ("As ", "length")
    assert servers.asked[-1][1]["temperature"] == 0.7
    whole = await engine(asked())
    again = {"role": "assistant", "content": "As you like."}
    more = await engine(asked((*said, again, {"role": "user", "content": "Once more."})))
    known = whole.prompt_ids + whole.completion_ids
    assert more.prompt_ids[: len(known)] == known
    # What the harness says of it is another text: that one is no continuation.
    other = await engine(asked((*said, again | {"content": "As I like."}, *said)))
    assert other.prompt_ids[: len(known)] != known
    servers.stop_reason = "aborted"
    with pytest.raises(DsecError) as given_up:
        await engine(asked())
    assert given_up.value.code is ErrorCode.UNAVAILABLE

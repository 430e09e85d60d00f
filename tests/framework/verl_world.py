"""verl's own agent loop worker, with a tokenizer of bytes and servers that say what they are told.

Its tokens are the bytes of the text and a few marks of the template, so a test can tell what any
of them stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import verl.trainer
from hydra import compose, initialize_config_dir
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config
from verl import DataProto
from verl.experimental.agent_loop import AgentLoopWorker, SingleTurnAgentLoop
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from dsec.adapters.verl_engine import VerlEngine

MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
#: As Qwen's, in short.
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def make_model(directory: Path) -> PreTrainedTokenizerFast:
    """Write a tokenizer and a configuration as a model has them; there are no weights."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=MARKS[0], eos_token=MARKS[2], chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(directory)
    Qwen2Config(
        vocab_size=len(words.get_vocab()), hidden_size=8, intermediate_size=8,
        num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(directory)  # fmt: skip
    return tokenizer


class ScriptedServers(LLMServerClient):
    """Answers each call with what a function makes of its prompt's text.

    Attributes:
        asked: the prompts' tokens and the parameters of all calls, in order.
        stop_reason: that they give.
        silent: they tell no log-probabilities.
    """

    def __init__(self, config: Any, tokenizer: Any, answer: Callable[[str], str]) -> None:
        super().__init__(config)
        self._tokenizer = tokenizer
        self._answer = answer
        self.asked: list[tuple[list[int], dict[str, Any]]] = []
        self.stop_reason = "completed"
        self.silent = False

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> Any:
        """Sample an answer, at most as long as it may be."""
        self.asked.append((list(prompt_ids), dict(sampling_params)))
        said = self._answer(self._tokenizer.decode(prompt_ids)) + "<|im_end|>"
        ids = self._tokenizer.encode(said)[: sampling_params["max_tokens"]]
        steps = len(self.asked)
        return TokenOutput(
            token_ids=ids,
            log_probs=None if self.silent else [-it / 1000 for it in ids],
            stop_reason=self.stop_reason,
            extra_fields={"min_global_steps": steps, "max_global_steps": steps},
        )


def configured(model: Path, loops: Path, *options: str) -> Any:
    """Return verl's whole configuration for a model and a file of agent loops."""
    directory = Path(verl.trainer.__file__).parent / "config"
    with initialize_config_dir(str(directory), version_base=None):
        return compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={model}",
                "actor_rollout_ref.rollout.name=vllm",
                "trainer.use_v1=false",
                "actor_rollout_ref.rollout.prompt_length=1024",
                "actor_rollout_ref.rollout.response_length=2048",
                "actor_rollout_ref.rollout.calculate_log_probs=true",
                "actor_rollout_ref.rollout.multi_turn.format=hermes",
                f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
                *options,
            ],
        )


def worker_of(config: Any, servers: ScriptedServers) -> Any:
    """Return the worker that plays rollouts with these servers."""
    return AgentLoopWorker(config, servers)


def loop_of(kind: Callable[..., Any], config: Any, servers: ScriptedServers) -> Any:
    """Return an agent loop as verl makes one for each rollout."""
    worker = worker_of(config, servers)
    return kind(
        trainer_config=DictConfigWrap(config),
        server_manager=servers,
        tokenizer=worker.tokenizer,
        processor=None,
        dataset_cls=worker.dataset_cls,
        data_config=DictConfigWrap(config.data),
        hf_model_type="qwen2",
    )


def engine_of(config: Any, servers: ScriptedServers) -> VerlEngine:
    """Return an engine, with the sampling parameters of a trainer, outside of any sandbox."""
    return VerlEngine(loop_of(SingleTurnAgentLoop, config, servers), {"temperature": 0.7}, 0)


def batch_of(rows: Sequence[dict[str, Any]]) -> Any:
    """Return rows of a dataset as verl hands them to a worker."""
    columns: dict[str, Any] = {}
    for name in rows[0]:
        columns[name] = np.empty(len(rows), dtype=object)
        columns[name][:] = [row[name] for row in rows]
    return DataProto(non_tensor_batch=columns)

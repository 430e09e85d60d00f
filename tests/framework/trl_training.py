"""Two steps of TRL's own GRPO on a model of a few weights, with completions from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

WORDS = ("<pad>", "<eos>", "<unk>", "run", "a", "command")


def _tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def train(reward: Any, run: Callable[[list[str]], list[str]], directory: Path) -> list[Any]:
    """Train with a reward function; ``run`` gives each completion's sandbox. The steps' figures."""
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=64,
        pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip

    def in_sandboxes(prompts: list[str], trainer: Any) -> dict[str, Any]:
        # The prompt comes once for each generation.
        return {
            "prompt_ids": [[3, 4, 5] for _ in prompts],
            "completion_ids": [[3, 1] for _ in prompts],
            "logprobs": [[-1.0, -1.0] for _ in prompts],
            "sandbox_id": run(prompts),
        }

    trainer = GRPOTrainer(
        model=LlamaForCausalLM(config),
        processing_class=_tokenizer(),
        reward_funcs=reward,
        rollout_func=in_sandboxes,
        train_dataset=Dataset.from_list([{"prompt": "run a command"}] * 4),
        args=GRPOConfig(
            output_dir=str(directory), max_steps=2, per_device_train_batch_size=2,
            num_generations=2, logging_steps=1, report_to=[], use_cpu=True, save_strategy="no",
            disable_tqdm=True, bf16=False,
        ),
    )  # fmt: skip
    trainer.train()
    return [step for step in trainer.state.log_history if "reward" in step]

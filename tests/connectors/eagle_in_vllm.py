"""A program: what vLLM drafts with an EAGLE-3 head. Reads JSON from standard input, writes JSON to standard output."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    """Answer prompts greedily, one at a time.

    The input has `model`, `head`, `drafted` (tokens of a draft), `prompts` (token ids) and `max_tokens`. The output has
    for each prompt its answer's `tokens`, and `drafts`: by length of the sequence, the tokens drafted behind it.
    """
    wanted = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to the standard output
    from reader_rag.bench.vllm.engine import import_vllm

    vllm: Any = import_vllm()
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    drafts: dict[int, list[int]] = {}
    propose = SpecDecodeBaseProposer.propose

    def noted(self: Any, *arguments: Any, **named: Any) -> Any:
        drafted = propose(self, *arguments, **named)
        positions, last = named["target_positions"], named["token_indices_to_sample"]
        state = int(positions[-1 if last is None else int(last[0])])
        drafts[state + 2] = drafted[0].tolist()  # behind the state comes the next token, behind that the draft
        return drafted

    SpecDecodeBaseProposer.propose = noted
    engine = vllm.LLM(
        model=wanted["model"],
        dtype="float32",
        max_model_len=512,
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        speculative_config={"method": "eagle3", "model": wanted["head"], "num_speculative_tokens": wanted["drafted"]},
    )
    params = vllm.SamplingParams(temperature=0.0, max_tokens=wanted["max_tokens"], ignore_eos=True)
    answers = []
    for prompt in wanted["prompts"]:
        drafts.clear()
        (answer,) = engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        answers.append({"tokens": list(answer.outputs[0].token_ids), "drafts": dict(drafts)})
    json.dump(answers, out)
    out.close()


if __name__ == "__main__":
    main()

"""`reader-rag bench`: the commands of all benchmarks."""

from __future__ import annotations

import typer

from reader_rag.bench.datastore.commands import datastore
from reader_rag.bench.figures.commands import report
from reader_rag.bench.generate.commands import cache, generate, speed_bench
from reader_rag.bench.gpu.commands import gpu
from reader_rag.bench.load.commands import load, load_memory
from reader_rag.bench.replay.commands import calibrate, drafting, recall, record, replay
from reader_rag.bench.vllm.commands import vllm, vllm_costs, vllm_stress

app = typer.Typer(help="Measure speed and exactness.", no_args_is_help=True)

for _command, _example in (
    (generate, "generate --prompts prompts.jsonl --categories rag --limit 10 --dtype bfloat16"),
    (report, "report --out docs/benchmarks/report --update README.md"),
    (speed_bench, "speed-bench --data ~/speed --splits qualitative,throughput_1k --limit 5"),
    (gpu, "gpu --model 8b/config.json --replay traces.jsonl --out gpu.md"),
    (load, "load --prompts prompts.jsonl --categories rag --limit 10"),
    (load_memory, "load-memory --shape qwen2.5-0.5b --quantization int8"),
    (replay, "replay traces.jsonl --top8 traces.npz --nodes 64"),
    (drafting, "drafting traces.jsonl --top8 traces.npz"),
    (recall, "recall traces.jsonl --top8 traces.npz"),
    (record, "record traces.jsonl --limit 20"),
    (calibrate, "calibrate traces.jsonl priors.npz --top8 traces.npz"),
    (datastore, "datastore --tokens 1e6,1e7,1e8 --plot cost.svg"),
    (cache, "cache --batch 8,32 --layers 8"),
    (vllm, "vllm --prompts prompts.jsonl --categories rag --limit 10"),
    (vllm_stress, "vllm-stress --requests 500"),
    (vllm_costs, "vllm-costs --model smollm2-135m --out costs.json"),
):
    app.command(epilog=f"Example: reader-rag bench {_example}")(_command)

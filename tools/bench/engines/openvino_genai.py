"""OpenVINO GenAI on the same GGUF file, which it requantises to its own format when it is opened."""

from __future__ import annotations

import numpy as np
import openvino as ov
import openvino_genai as og


class Engine:
    """Generates only: its figures are its own ``perf_metrics``."""

    def __init__(self, model: str, threads: int) -> None:
        scheduler = og.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # prompts are computed, not remembered from the round before
        self._pipeline = og.LLMPipeline(model, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads)

    def generate(self, tokens: list[int], steps: int) -> tuple[float, float]:
        config = og.GenerationConfig(max_new_tokens=steps + 1, ignore_eos=True)
        ids = np.array([tokens], np.int64)
        inputs = og.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        metrics = self._pipeline.generate(inputs, config).perf_metrics
        first = metrics.get_ttft().mean / 1000
        return first, metrics.get_tpot().mean / 1000 * steps if steps else 0.0

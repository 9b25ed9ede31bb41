"""OpenVINO GenAI in process: its continuous-batching pipeline with prefix caching, stepped by hand."""

import argparse
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import openvino
import openvino_genai

from peers.workers.loop import serve

KV_GIB = 1
BATCHED_TOKENS = 2048  # a whole prompt in one step


class OpenVino:
    def __init__(self, options: argparse.Namespace) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = KV_GIB
        scheduler.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = BATCHED_TOKENS
        properties = {"INFERENCE_NUM_THREADS": options.threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(options.model, scheduler, "CPU", properties)
        self._number = 0

    def run(self, prompts: Sequence[Sequence[int]], new: int) -> Iterator[Mapping[int, int]]:
        greedy = openvino_genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
        handles = [self._add(prompt, greedy) for prompt in prompts]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            yield {i: token for i, handle in enumerate(handles) for token in _read(handle)}

    def _add(
        self, prompt: Sequence[int], greedy: "openvino_genai.GenerationConfig"
    ) -> "openvino_genai.GenerationHandle":
        self._number += 1
        return self._pipeline.add_request(self._number, openvino.Tensor(np.array([prompt], np.int64)), greedy)


def _read(handle: "openvino_genai.GenerationHandle") -> list[int]:
    if not handle.can_read():
        return []
    return [token for output in handle.read().values() for token in output.generated_ids]


if __name__ == "__main__":
    serve(OpenVino)

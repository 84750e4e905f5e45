"""Made-up answers and what a tiny target says about them, for the tests of training."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from drafter_service.training.features import Capture, FeatureWriter
from drafter_service.training.run_config import TrainConfig
from drafter_service.training.store import Response
from drafter_service.training.target import Target

LAYERS = (0, 2)


def made_up(count: int, seed: int = 0, *, counting: bool = False) -> list[Response]:
    """Answers of random tokens, or of tokens that count on."""
    draw = random.Random(seed)
    responses = []
    for number in range(count):
        length, prompt, start = draw.randint(12, 30), draw.randint(2, 5), draw.randrange(60)
        tokens = tuple(start + i if counting else draw.randrange(256) for i in range(length))
        responses.append(
            Response(
                key=f"made/{number}|t1|{number}",
                source="made",
                prompt=tokens[:prompt],
                answer=tokens[prompt:],
                logprobs=tuple(-draw.random() for _ in tokens[prompt:]),
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                seed=number,
                finished=False,
            )
        )
    return responses


def write_features(target: Target, folder: Path, responses: list[Response]) -> Path:
    """What `draftwire-train features` writes for those answers."""
    capture = Capture(target, LAYERS, 8)
    writer = FeatureWriter(folder, target.identity, LAYERS, 8)
    writer.write(responses, [capture.run(r.tokens) for r in responses])
    return folder


def run_config(features: Path, target: Path, out: Path, **changes: Any) -> TrainConfig:
    """Settings of a run that takes seconds."""
    config = TrainConfig(
        features=(str(features),),
        out=out,
        target=str(target),
        layers=2,
        block_size=4,
        anchors=6,
        batch=4,
        steps=12,
        lr=2e-3,
        validation=0.2,
        validate_every=1000,
        save_every=1000,
    )
    return replace(config, **changes)

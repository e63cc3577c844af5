from __future__ import annotations

import numpy as np

from turboserve.bench.streaming.decode import decode
from turboserve.worker.media import FragmentEncoder


def test_fragments_that_follow_each_other_decode_as_one_video_without_gaps() -> None:
    encoder = FragmentEncoder()
    shades = (40, 120, 200)
    packages = [
        encoder.encode(np.full((12, 64, 64, 3), shade, np.uint8), index=i, first_frame=12 * i, fps=16.0)
        for i, shade in enumerate(shades)
    ]
    whole = decode(packages[0].init + b"".join(package.fragment for package in packages))
    assert whole.frames.shape == (36, 64, 64, 3)
    assert whole.fps == 16.0
    assert whole.gaps() == []
    middle = whole.between(0.75, 1.5)
    assert len(middle) == 12
    assert abs(float(middle.mean()) - 120) < 4

    torn = decode(packages[0].init + packages[0].fragment + packages[2].fragment)
    assert len(torn.gaps()) == 1

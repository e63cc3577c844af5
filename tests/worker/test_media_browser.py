"""The same fragments in a real browser: Media Source Extensions accept them, and red is red."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from tests.helpers.browser import NEEDS_CHROMIUM
from turboserve.worker.media import FragmentEncoder

pytestmark = NEEDS_CHROMIUM

PLAY = """
async ({codec, parts}) => {
  const video = document.createElement('video');
  video.muted = true;
  const source = new MediaSource();
  video.src = URL.createObjectURL(source);
  await new Promise(done => source.addEventListener('sourceopen', done, {once: true}));
  const buffer = source.addSourceBuffer(`video/mp4; codecs="${codec}"`);
  for (const part of parts) {
    const bytes = Uint8Array.from(atob(part), c => c.charCodeAt(0));
    buffer.appendBuffer(bytes);
    await new Promise((done, failed) => {
      buffer.addEventListener('updateend', done, {once: true});
      buffer.addEventListener('error', () => failed('refused'), {once: true});
    });
  }
  const ranges = [];
  for (let n = 0; n < video.buffered.length; n++)
    ranges.push([video.buffered.start(n), video.buffered.end(n)]);
  const colours = [];
  let before = [0, 0, 0];
  for (const at of [0.2, 1.0, 1.8]) {
    video.currentTime = at;
    await new Promise(done => video.addEventListener('seeked', done, {once: true}));
    const canvas = new OffscreenCanvas(video.videoWidth, video.videoHeight);
    const context = canvas.getContext('2d');
    const look = () => {
      context.drawImage(video, 0, 0);
      return [...context.getImageData(32, 32, 1, 1).data.slice(0, 3)];
    };
    // On a busy machine `seeked` comes before the new picture: until then the one before is drawn, or black.
    let colour = look();
    for (let tries = 0; tries < 600 && colour.join() === before.join(); tries++) {
      await new Promise(done => setTimeout(done, 50));
      colour = look();
    }
    colours.push(colour);
    before = colour;
  }
  return {ranges, colours};
}
"""


async def test_chromium_plays_joined_fragments_in_the_right_colours(page: Any) -> None:
    colours = [(255, 0, 0), (0, 0, 255), (0, 200, 0)]
    chunks = []
    first = 0
    for index, colour in enumerate(colours):
        count = 9 if index == 0 else 12
        frames = np.full((count, 64, 64, 3), colour, np.uint8)
        chunks.append(FragmentEncoder().encode(frames, index=index, first_frame=first, fps=16))
        first += count
    # Each with its init segment, as chunks are sent: a repeated one must not disturb the timeline.
    parts = [base64.b64encode(data).decode() for chunk in chunks for data in (chunk.init, chunk.fragment)]

    seen = await page.evaluate(PLAY, {"codec": chunks[0].codec, "parts": parts})
    assert seen["ranges"] == [[0, pytest.approx(first / 16)]]
    for shown, meant in zip(seen["colours"], colours, strict=True):
        # Chromium's own conversion (libyuv) clips the factor of blue: pure blue comes out as 243.
        assert np.abs(np.array(shown) - meant).max() <= 14, seen

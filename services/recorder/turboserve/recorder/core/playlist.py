"""HLS media playlists with fragmented MP4. Source: RFC 8216."""

from __future__ import annotations

import math

from turboserve.recorder.core.segments import Index


def media_playlist(index: Index, complete: bool, segment_s: float) -> str:
    """Return the playlist of all segments. `segment_s`: longest segment that is still to come, seconds.

    While the recording grows, segments are only appended, so the playlist has the type EVENT.
    """
    longest = max((segment.duration_s for segment in index.segments), default=0.0)
    if not complete:
        longest = max(longest, segment_s)
    lines = [
        "#EXTM3U",
        "#EXT-X-VERSION:7",
        f"#EXT-X-TARGETDURATION:{max(1, math.ceil(longest - 1e-6))}",
        "#EXT-X-MEDIA-SEQUENCE:0",
        f"#EXT-X-PLAYLIST-TYPE:{'VOD' if complete else 'EVENT'}",
        "#EXT-X-INDEPENDENT-SEGMENTS",
    ]
    for number, part in enumerate(index.parts):
        if number:
            lines.append("#EXT-X-DISCONTINUITY")
        lines.append(f'#EXT-X-MAP:URI="inits/{number + 1}.mp4"')
        for segment in part.segments:
            lines += [f"#EXTINF:{segment.duration_s:.6f},", f"segments/{segment.first}.m4s"]
    if complete:
        lines.append("#EXT-X-ENDLIST")
    return "\n".join([*lines, ""])

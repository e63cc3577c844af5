"""Checks an SDP offer before anything is made of it, and removes what the gateway does not use."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from turboserve.gateway.problems.errors import InvalidOfferError, UnsupportedOfferError

MEDIA_LIMIT = 4
CANDIDATE_LIMIT = 32
LINE_LIMIT = 2_000
_H264 = re.compile(r"a=rtpmap:(\d{1,3}) H264/90000", re.IGNORECASE)
_FMTP = re.compile(r"a=fmtp:(\d{1,3}) (.+)")
_SECRETS = {"a=ice-ufrag:": "ice-ufrag", "a=ice-pwd:": "ice-pwd", "a=fingerprint:": "fingerprint"}
_REPORTS = re.compile(r"a=rtcp-fb:\S+ (?:goog-remb|transport-cc)\s*")


@dataclass(frozen=True)
class CheckedOffer:
    """An offer to receive H.264 video."""

    sdp: str
    messages: bool
    """Whether it has a data channel."""


def check_offer(text: str, *, candidates: bool) -> CheckedOffer:
    """Return the offer without what the gateway does not use.

    `candidates`: whether to keep the client's ICE candidates, of which only literal addresses over UDP are
    kept: a name would make the gateway ask name servers. Without them the gateway sends nothing before the
    client's first authenticated check has shown its address.

    Raises:
        InvalidOfferError: The text is no SDP offer, or lacks a part that WebRTC needs.
        UnsupportedOfferError: It has no video of H.264 with packetization mode 1 that the client receives.
    """
    lines = text.replace("\r\n", "\n").rstrip("\n").split("\n")
    if lines[0] != "v=0":
        raise InvalidOfferError("the body is no SDP: its first line is not v=0", field="body", limit="v=0")
    if len(lines) > LINE_LIMIT:
        raise InvalidOfferError(f"the offer has more than {LINE_LIMIT} lines", field="body", limit=LINE_LIMIT)
    media = [line for line in lines if line.startswith("m=")]
    if not media or len(media) > MEDIA_LIMIT:
        raise InvalidOfferError(
            f"the offer has {len(media)} media sections: 1 to {MEDIA_LIMIT} are possible",
            field="m",
            limit=MEDIA_LIMIT,
        )
    for prefix, name in _SECRETS.items():
        if not any(line.startswith(prefix) for line in lines):
            raise InvalidOfferError(f"the offer has no {name}", field=name)
    _check_video(lines)
    kept, found = [], 0
    for line in lines:
        if line.startswith("a=candidate:"):
            if not candidates or found == CANDIDATE_LIMIT or not _is_literal(line):
                continue
            found += 1
        elif line.startswith("a=extmap:") or _REPORTS.fullmatch(line):
            # Video is not adapted to the network, so the client need not report it, nor the gateway say more.
            continue
        elif line.startswith("a=end-of-candidates"):
            # More candidates follow: the client's first check may be what makes its address known.
            continue
        kept.append(line)
    return CheckedOffer("\r\n".join(kept) + "\r\n", any(line.startswith("m=application ") for line in media))


def _check_video(lines: list[str]) -> None:
    """Check that one section is video that the client receives as H.264 in several packets a frame."""
    videos = _sections(lines, "m=video ")
    if len(videos) != 1:
        raise UnsupportedOfferError(
            f"the offer has {len(videos)} video sections: one is needed", field="m", limit="video"
        )
    [video] = videos
    if not {"a=recvonly", "a=sendrecv"} & set(video):
        raise UnsupportedOfferError(
            "the offer does not receive video: its direction is neither recvonly nor sendrecv",
            field="m",
            limit="recvonly",
        )
    formats = {match[1] for line in video if (match := _H264.fullmatch(line.strip()))}
    modes = {
        match[1] for line in video if (match := _FMTP.match(line)) and "packetization-mode=1" in match[2]
    }
    if not formats & modes:
        raise UnsupportedOfferError(
            "the offer has no H.264 with packetization-mode=1, which is all that there is",
            field="rtpmap",
            limit="H264/90000",
        )


def _sections(lines: list[str], prefix: str) -> list[list[str]]:
    found: list[list[str]] = []
    inside = False
    for line in lines:
        if line.startswith("m="):
            inside = line.startswith(prefix)
            if inside:
                found.append([])
        if inside:
            found[-1].append(line)
    return found


def _is_literal(line: str) -> bool:
    """Whether a candidate is an address over UDP. Browsers hide addresses behind names of multicast DNS."""
    parts = line.split()
    if len(parts) < 8 or parts[2].lower() != "udp":
        return False
    try:
        ipaddress.ip_address(parts[4])
    except ValueError:
        return False
    return True

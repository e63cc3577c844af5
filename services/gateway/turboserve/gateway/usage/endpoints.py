"""REST: /v1/usage and /v1/usage.csv."""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response, StreamingResponse

from turboserve.contracts.base import Id, Text
from turboserve.contracts.errors import InvalidInputError, UnavailableError
from turboserve.contracts.keys import Scope
from turboserve.contracts.usage import BY_DAY, ListUsage, UsageDimension, UsagePage
from turboserve.gateway.auth.access import Identity
from turboserve.gateway.auth.middleware import Caller, needs
from turboserve.gateway.context import Gateway, gateway_of
from turboserve.gateway.problems.schemas import problems
from turboserve.gateway.usage.schemas import EPOCH, UsageBucket, UsageList, entries_of, number_of
from turboserve.subjects import LIST_USAGE

DEFAULT_DAYS = 31
PAGE = 1_000
COLUMNS = (
    "day",
    "tenant",
    "key",
    "gpu_seconds",
    "money",
    "currency",
    "chunks",
    "viewer_seconds",
    "video_seconds",
    "delivered_bytes",
    "hour",
    "model",
    "width",
    "height",
)

router = APIRouter(prefix="/v1", tags=["cost"])

Context = Annotated[Gateway, Depends(gateway_of)]


class Range:
    """The days and the tenant of a request, and by what it sums."""

    def __init__(
        self,
        caller: Caller,
        gateway: Context,
        first: Annotated[
            date | None,
            Query(
                alias="from", description="First day, of UTC. Default: 31 days back.", examples=["2026-11-01"]
            ),
        ] = None,
        to: Annotated[
            date | None, Query(description="Last day, of UTC. Default: today.", examples=["2026-11-30"])
        ] = None,
        tenant: Annotated[
            Id | None,
            Query(
                description="Only this tenant. With the scope `admin`: any; without it: the key's own.",
                examples=["acme"],
            ),
        ] = None,
        group_by: Annotated[
            list[UsageDimension] | None,
            Query(
                max_length=len(UsageDimension),
                description="Sum over all but these, for example `group_by=day&group_by=tenant`. Default: "
                "`day`, `tenant` and `key`.",
                examples=[["day", "tenant"]],
            ),
        ] = None,
        by: Annotated[
            UsageBucket | None,
            Query(
                description="The length of time of an entry, added to `group_by`. `by=hour` alone: by hour, "
                "tenant and key.",
                examples=["hour"],
            ),
        ] = None,
    ) -> None:
        last = to or datetime.fromtimestamp(gateway.clock.wall(), UTC).date()
        begins = first or max(last - timedelta(days=DEFAULT_DAYS - 1), EPOCH)
        if begins < EPOCH or last < begins:
            limit = f"{EPOCH.isoformat()} to {last.isoformat()}"
            raise InvalidInputError(f"from: must be in {limit}", field="from", limit=limit)
        self.from_day, self.to_day = number_of(begins), number_of(last)
        self.tenant = _tenant(caller, tenant)
        self.group_by = _dimensions(group_by or BY_DAY, by)
        self._bus = gateway.bus

    async def page(self, limit: int, after: str | None) -> UsagePage:
        # Usage is kept by these.
        sums = self.group_by if self.group_by != BY_DAY else ()
        request = ListUsage(
            tenant=self.tenant,
            from_day=self.from_day,
            to_day=self.to_day,
            limit=limit,
            after=after,
            group_by=sums,
        )
        page = await self._bus.call(LIST_USAGE, request)
        if sums and page.days:
            raise UnavailableError("a state store of an earlier version does not sum usage", field="group_by")
        return page


def _dimensions(chosen: Sequence[UsageDimension], by: UsageBucket | None) -> tuple[UsageDimension, ...]:
    """Return the dimensions in their order. An hour names its day."""
    wanted = {*chosen, *(() if by is None else (UsageDimension(by.value),))}
    if UsageDimension.HOUR in wanted:
        wanted.add(UsageDimension.DAY)
    return tuple(one for one in UsageDimension if one in wanted)


def _tenant(caller: Identity, wanted: str | None) -> str | None:
    """Return the tenant to list; None: all. Raises MissingScopeError for another one than the caller's."""
    if wanted == caller.tenant:
        return wanted
    if wanted is not None:
        caller.require(Scope.ADMIN)
        return wanted
    return None if caller.may(Scope.ADMIN) else caller.tenant


@router.get(
    "/usage",
    dependencies=[needs(Scope.SESSIONS_READ)],
    operation_id="list_usage",
    summary="List what was used, by day or hour",
    description="GPU-seconds, money, chunks, seconds of video, viewers' time and bytes sent to viewers, of "
    "the tenant's sessions by day of UTC and API key, oldest day first, by page. `group_by` sums, or "
    "divides by model. `by=hour` divides by hour. With the scope `admin`: of all tenants.",
    responses=problems(401, 422),
)
async def list_usage(
    days: Annotated[Range, Depends()],
    limit: Annotated[
        int, Query(ge=1, le=PAGE, description="Maximum number of entries on the page.", examples=[100])
    ] = 100,
    after: Annotated[
        Text | None,
        Query(max_length=256, description="The `next` of the page before.", examples=["20781.acme."]),
    ] = None,
) -> UsageList:
    return UsageList.of(await days.page(limit, after), days.group_by)


@router.get(
    "/usage.csv",
    dependencies=[needs(Scope.SESSIONS_READ)],
    operation_id="export_usage",
    summary="Export what was used, by day or hour, as CSV",
    description="As `/v1/usage`, the whole range in one file (RFC 4180) with a line of names. If the state "
    "store fails on the way, the connection ends without the rest.",
    response_class=Response,
    responses={
        200: {
            "description": f"The columns are {', '.join(COLUMNS)}.",
            "content": {"text/csv": {"schema": {"type": "string"}}},
        },
        **problems(401, 422),
    },
)
async def export_usage(days: Annotated[Range, Depends()]) -> Response:
    # A problem with the first page is answered as one.
    first = await days.page(PAGE, None)
    name = "usage.csv" if days.tenant is None else f"usage-{days.tenant}.csv"
    headers = {"Content-Disposition": f'attachment; filename="{name}"', "Cache-Control": "no-store"}
    return StreamingResponse(_lines(days, first), media_type="text/csv", headers=headers)


async def _lines(days: Range, page: UsagePage) -> AsyncIterator[str]:
    yield _csv([COLUMNS])
    while True:
        yield _csv(
            [
                (
                    row.day or "",
                    row.tenant or "",
                    row.key or "",
                    f"{row.gpu_seconds:.3f}",
                    f"{row.money:.6f}",
                    page.currency,
                    row.chunks,
                    f"{row.viewer_seconds:.3f}",
                    f"{row.video_seconds:.3f}",
                    row.delivered_bytes,
                    "" if row.hour is None else f"{row.hour:%Y-%m-%dT%H:00:00Z}",
                    row.model or "",
                    row.width or "",
                    row.height or "",
                )
                for row in entries_of(page)
            ]
        )
        if page.next is None:
            return
        page = await days.page(PAGE, page.next)


def _csv(rows: list[tuple[object, ...]]) -> str:
    # Ids have letters, digits, '_' and '-' only, so a spreadsheet computes none of them.
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()

"""/healthz, /readyz, /metrics: for supervisors, probes and Prometheus."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Response
from pydantic import Field

from turboserve import telemetry
from turboserve.gateway.context import Gateway, gateway_of
from turboserve.gateway.public import PublicOutput

router = APIRouter(tags=["health"])


class Health(PublicOutput):
    """The process answers."""

    status: Literal["ok"] = Field(default="ok", description="Always `ok`.", examples=["ok"])


class Readiness(PublicOutput):
    """Whether the gateway can serve requests."""

    status: Literal["ready", "not ready"] = Field(
        description="`ready` if all `checks` hold.", examples=["ready"]
    )
    checks: dict[str, bool] = Field(
        description="Condition → whether it holds.", examples=[{"log_chunks": True, "schema_version": True}]
    )
    warnings: dict[str, str] = Field(
        {}, description="Warnings about a gateway that can serve, by subject.", examples=[{}]
    )


@router.get(
    "/healthz",
    operation_id="get_liveness",
    summary="Liveness of the process",
    description="Answers as long as the process runs. A supervisor restarts the process if it does not.",
)
async def healthz() -> Health:
    return Health()


@router.get(
    "/readyz",
    operation_id="get_readiness",
    summary="Readiness of the service",
    description="Whether requests can be served. A load balancer sends requests to ready gateways only.",
    responses={
        503: {"model": Readiness, "description": "Not ready. `checks` names the conditions that do not hold."}
    },
)
async def readyz(response: Response, gateway: Annotated[Gateway, Depends(gateway_of)]) -> Readiness:
    checks = gateway.checks()
    good = all(checks.values())
    response.status_code = 200 if good else 503
    return Readiness(status="ready" if good else "not ready", checks=checks, warnings=gateway.warnings())


class PrometheusText(Response):
    media_type = "text/plain; version=0.0.4"


@router.get(
    "/metrics",
    operation_id="get_metrics",
    summary="Metrics in Prometheus' text format",
    description="The gateway's own metrics. Other services have endpoints of their own.",
    response_class=PrometheusText,
)
async def prometheus() -> Response:
    return PrometheusText(telemetry.prometheus_text())

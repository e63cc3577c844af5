"""/healthz, /readyz, /metrics: for supervisors, probes and Prometheus."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel, Field

from turboserve import telemetry
from turboserve.gateway.context import Gateway, gateway_of

router = APIRouter(tags=["health"])


class Health(BaseModel):
    status: Literal["ok"] = "ok"


class Readiness(BaseModel):
    status: Literal["ready", "not ready"]
    checks: dict[str, bool]
    warnings: dict[str, str] = Field({}, description="Warnings about a service that is usable.")


@router.get("/healthz", summary="Liveness of the process")
async def healthz() -> Health:
    return Health()


@router.get(
    "/readyz",
    summary="Readiness of the service",
    responses={503: {"model": Readiness, "description": "Not ready; `checks` names what is missing."}},
)
async def readyz(response: Response, gateway: Annotated[Gateway, Depends(gateway_of)]) -> Readiness:
    checks = gateway.checks()
    good = all(checks.values())
    response.status_code = 200 if good else 503
    return Readiness(status="ready" if good else "not ready", checks=checks, warnings=gateway.warnings())


class PrometheusText(Response):
    media_type = "text/plain; version=0.0.4"


@router.get("/metrics", summary="Metrics in Prometheus' text format", response_class=PrometheusText)
async def prometheus() -> Response:
    return PrometheusText(telemetry.prometheus_text())

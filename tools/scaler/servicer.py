"""KEDA's external scaler. The metric is the number of shards itself, so that Kubernetes has nothing left to compute."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry

from kvloom.v1 import external_scaler_pb2_grpc
from kvloom.v1.external_scaler_pb2 import (
    GetMetricSpecResponse,
    GetMetricsRequest,
    GetMetricsResponse,
    IsActiveResponse,
    MetricSpec,
    MetricValue,
    ScaledObjectRef,
)
from tools.scaler import metrics
from tools.scaler.policy import Recommendation
from tools.scaler.watch import FleetWatch

METRIC: Final = "kvloom-shards"
MAX_STREAMS: Final = 256
Context = grpc.aio.ServicerContext[Any, Any]


class ExternalScaler(external_scaler_pb2_grpc.ExternalScalerServicer):
    def __init__(self, watch: FleetWatch, registry: CollectorRegistry) -> None:
        self._watch = watch
        self._questions = metrics.QUESTIONS.family(registry)
        self._num_streams = 0

    async def IsActive(self, request: ScaledObjectRef, context: Context) -> IsActiveResponse:
        answer = IsActiveResponse(result=await self._is_active(request, context))
        self._questions.labels("IsActive").inc()
        return answer

    async def StreamIsActive(self, request: ScaledObjectRef, context: Context) -> AsyncIterator[IsActiveResponse]:
        if self._num_streams >= MAX_STREAMS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"There are {MAX_STREAMS} streams already.")
        self._num_streams += 1
        self._questions.labels("StreamIsActive").inc()
        try:
            told: bool | None = None
            while True:
                num_readings = self._watch.num_readings
                is_active = await self._is_active(request, context)
                if is_active is not told:
                    told = is_active
                    yield IsActiveResponse(result=is_active)
                await self._watch.until_read_after(num_readings)
        finally:
            self._num_streams -= 1

    async def GetMetricSpec(self, request: ScaledObjectRef, context: Context) -> GetMetricSpecResponse:
        await _model_of(request, context)
        self._questions.labels("GetMetricSpec").inc()
        return GetMetricSpecResponse(metricSpecs=[MetricSpec(metricName=METRIC, targetSize=1, targetSizeFloat=1.0)])

    async def GetMetrics(self, request: GetMetricsRequest, context: Context) -> GetMetricsResponse:
        found = await self._recommendation(request.scaledObjectRef, context)
        number = 1 if found is None else found.num_shards
        self._questions.labels("GetMetrics").inc()
        value = MetricValue(metricName=METRIC, metricValue=number, metricValueFloat=float(number))
        return GetMetricsResponse(metricValues=[value])

    async def _is_active(self, about: ScaledObjectRef, context: Context) -> bool:
        """True when the model should have a shard: one serves it, or would serve requests that wait for one."""
        found = await self._recommendation(about, context)
        return found is not None and found.num_shards > 0

    async def _recommendation(self, about: ScaledObjectRef, context: Context) -> Recommendation | None:
        """None for a model of which no shard has ever joined, and for which no request waits."""
        model = await _model_of(about, context)
        if not self._watch.is_current:
            # KEDA leaves the number of shards as it is: fewer would be wrong, and more may not help.
            await _fail(context, grpc.StatusCode.UNAVAILABLE, "No router answers.")
        return self._watch.recommendations.get(model)


async def _model_of(about: ScaledObjectRef, context: Context) -> str:
    model = about.scalerMetadata.get("model", "")
    if not model:
        await _fail(context, grpc.StatusCode.INVALID_ARGUMENT, "scalerMetadata.model is required: the model's name.")
    return model


async def _fail(context: Context, code: grpc.StatusCode, message: str) -> NoReturn:
    await context.abort(code, message)

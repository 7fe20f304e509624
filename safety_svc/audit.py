"""Reports forbidden texts: by metrics, in the log, and in the audit log. Only the last one has text, encrypted."""

from __future__ import annotations

import time
from pathlib import Path

import structlog

from kvloom_common.audit.keys import Retention
from kvloom_common.audit.log import AuditLog
from kvloom_common.config import SafetyConfig
from kvloom_common.tracing import attributes
from kvloom_common.tracing.spans import Span
from kvloom_common.tracing.trace_context import TraceContext, parse_traceparent, router_span
from kvloom_common.tracing.tracer import Tracer
from safety_svc.connection import Found
from safety_svc.metrics import BLOCKS, FLAGS, RULES

log = structlog.get_logger()


class Audit:
    """The reports of one process."""

    def __init__(self, audit_log: AuditLog | None = None, tracer: Tracer | None = None) -> None:
        """Report to the audit log and to the traces of requests, where there are such (not None)."""
        self._audit_log = audit_log
        self._tracer = tracer

    @classmethod
    def at(cls, config: SafetyConfig, name: str, tracer: Tracer | None = None) -> Audit:
        """The audit of the process with this name; without a directory it has no audit log. Raises OSError."""
        retention = Retention(config.audit_retention_days, config.audit_retention_by_tenant)
        return cls(AuditLog(Path(config.audit_dir), name, retention) if config.audit_dir else None, tracer)

    def close(self) -> None:
        """Close the audit log, if there is one."""
        if self._audit_log is not None:
            self._audit_log.close()

    def __call__(self, found: Found) -> None:
        """Report a text. `is_blocked`: it is not shown."""
        is_prompt = found.target == "prompt"
        (BLOCKS if found.is_blocked else FLAGS).labels(found.target, RULES.fold(found.rule)).inc()
        if self._audit_log is not None:
            self._write(self._audit_log, found)
        if self._tracer is not None and (edge := parse_traceparent(found.names.get("traceparent", ""))) is not None:
            self._tracer.write(_span_of(found, edge, time.time()))
        target, rule, names = found.target, found.rule, found.names
        if found.is_blocked:
            log.warning("prompt_blocked" if is_prompt else "answer_blocked", target=target, rule=rule, **names)
        else:
            log.info("prompt_flagged" if is_prompt else "answer_flagged", target=target, rule=rule, **names)

    def _write(self, audit_log: AuditLog, found: Found) -> None:
        try:
            audit_log.append(
                "blocked" if found.is_blocked else "flagged",
                found.excerpt,
                target=found.target,
                rule=found.rule,
                policy=found.policy,
                tenant=found.names.get("tenant", ""),
                safety_identifier=found.safety_identifier,
                request_id=found.names.get("request_id", ""),
                position=found.position,
                needs_review=found.needs_review,
            )
        except OSError as error:  # the text is blocked all the same
            log.warning("audit_write_failed", error=error.strerror, rule=found.rule)


def _span_of(found: Found, edge: TraceContext, now: float) -> Span:
    """Return the span of a text that was found, below that of the request's router. It has no length."""
    router = router_span(edge, found.names.get("request_id", ""))
    return Span(
        "guardrail",
        router.child(f"guardrail {found.target} {found.rule}"),
        router.span_id,
        now,
        now,
        {attributes.RULE: found.rule, "kvloom.safety.target": found.target, "kvloom.safety.blocked": found.is_blocked},
        is_notable=True,
    )

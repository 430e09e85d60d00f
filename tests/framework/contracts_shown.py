"""The two contracts that are shown wherever contracts are explained."""

from __future__ import annotations

from typing import Final

WEATHER_FORECASTER: Final = """\
name: weather_forecaster
version: 1.0
description: Fetch weather data and generate human-readable summary
capabilities:
  - tool: http_client
    permissions: [network_access]
    rate_limit: 10req/min
  - tool: llm_summarizer
    model: deepseek-v2-7b
    max_tokens: 512
    temperature: 0.3
resources:
  min_cu: 15
  max_cu: 45
  memory_mb: 4096
lifecycle:
  timeout: 120s
  retry_policy:
    max_attempts: 2
    backoff: exponential
    jitter: 0.1
"""

PDF_ANALYZER: Final = """\
name: pdf_analyzer
version: 1.2
capabilities:
  - tool: pdf_parser
    permissions: [read_file, network_access]
  - tool: llm_summarizer
    model: deepseek-v2-7b
    max_tokens: 2048
lifecycle:
  timeout: 300s
  retry_policy:
    max_attempts: 3
    backoff: exponential
"""

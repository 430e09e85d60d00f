"""The weather agents: as one may write it, and that of the examples; and the world they ask."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from documents import ROOT
from outside_web import Answer, Asked, Web, certificate_for, completion, web

WEATHER_HOST = "api.weather.com"
_EXAMPLE = ROOT / "examples" / "weather"

PROGRAM = """\
from dsec import Agent, ToolCall
import json

class WeatherForecaster(Agent):
    def __init__(self):
        super().__init__()
        self.http = self.get_tool("http_client")
        self.llm = self.get_tool("llm_summarizer")

    def execute(self, location: str) -> str:
        # Step 1: Fetch weather API
        response = self.http.get(
            f"https://api.weather.com/v3/wx/forecast/daily/5day?locationKey={location}&language=en-US",
            headers={"Accept": "application/json"}
        )
        if response.status_code != 200:
            raise RuntimeError(f"API failed: {response.status_code}")

        # Step 2: Summarize with LLM
        weather_data = json.loads(response.text)
        summary = self.llm.invoke(
            prompt=f"Summarize this 5-day forecast in plain English: {weather_data}",
            max_tokens=512
        )
        return summary

if __name__ == "__main__":
    agent = WeatherForecaster()
    agent.serve()
"""


@dataclass
class WeatherAgent:
    """The agent's program, and what it asks."""

    argv: tuple[str, ...]
    environment: dict[str, str]
    weather: Web
    model: Web


def forecast(asked: Asked) -> Answer:
    """Answer as a weather service that knows one place."""
    if "locationKey=101010100&" not in asked.path:
        return Answer(status=404)
    return Answer(body='{"narrative": ["Rain", "Sun"]}')


@contextlib.contextmanager
def weather_agent(directory: Path, *, example: bool = False) -> Iterator[WeatherAgent]:
    """Put an agent's files into a directory and yield how to run it."""
    for file in _EXAMPLE.glob("weather_agent.*"):
        shutil.copy(file, directory)
    program = directory / "weather_agent.py"
    if not example:
        program.write_text(PROGRAM, encoding="utf-8")
    certificate, trusted = certificate_for(WEATHER_HOST, directory)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DSEC_")}
    with (
        web(forecast, certificate) as weather,
        web(lambda _: completion("Rain, then sun.")) as model,
    ):
        environment = kept | {
            "https_proxy": weather.url,
            "no_proxy": "127.0.0.1",
            "SSL_CERT_FILE": str(trusted),
            "OPENAI_BASE_URL": f"{model.url}/v1",
        }
        yield WeatherAgent((sys.executable, str(program)), environment, weather, model)

"""An agent with two tools: fetches a forecast and has a model put it into words.

Its contract is beside it. At hand: ``python weather_agent.py --location 101010100``, with
``OPENAI_BASE_URL`` set to a model's server. In a sandbox that serves a rollout it works for the
trainer, and goes on after a crash with the forecast that it has already fetched.
"""

from __future__ import annotations

from dsec import Agent

FORECAST = "https://api.weather.com/v3/wx/forecast/daily/5day"


class WeatherForecaster(Agent):
    """Tells what the weather will be at a place."""

    def __init__(self) -> None:
        super().__init__()
        self.http = self.get_tool("http_client")
        self.llm = self.get_tool("llm_summarizer")

    def execute(self, location: str) -> str:
        """Return five days' weather in plain English."""
        key = f"forecast/{location}"
        forecast = self.context.state.get(key)
        if forecast is None:
            response = self.http.get(
                FORECAST,
                params={"locationKey": location, "language": "en-US"},
                headers={"Accept": "application/json"},
            )
            if response.status_code != 200:
                raise RuntimeError(f"API failed: {response.status_code}")
            forecast = response.json()
            self.context.state.put(key, forecast)
        return self.llm.invoke(
            prompt=f"Summarize this 5-day forecast in plain English: {forecast}", max_tokens=512
        )


if __name__ == "__main__":
    WeatherForecaster().serve()

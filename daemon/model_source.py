"""The daemon's one model: loaded when a task first needs it, and afresh for the next task after its engine gave up."""

from __future__ import annotations

import asyncio
from typing import Any

from ..agent_tasks.run import ProgressCallback
from ..engine.chat import ChatModel, ModelError
from ..engine.client import EngineSettings
from ..engine.errors import QuadjetError
from ..engine.local_model import LocalChatModel
from .config import Config
from .models import ModelStore


class EngineSource:
    """daemon.server.ModelSource over a local engine process."""

    def __init__(self, config: Config, models: ModelStore) -> None:
        self._config = config.engine
        self._models = models
        self._lock = asyncio.Lock()
        self._model: LocalChatModel | None = None
        self._listeners: set[ProgressCallback] = set()
        self._past_restarts = 0
        """Of engines that gave up."""

    async def __call__(self, on_progress: ProgressCallback, /) -> ChatModel:
        """The model. Whoever waits while it loads hears of the progress. Raises ModelError if it cannot be had."""
        self._listeners.add(on_progress)
        try:
            async with self._lock:
                if self._model is not None and self._model.client.failure is not None:
                    await self.close()
                if self._model is None:
                    self._model = await self._load()
                return self._model
        except QuadjetError as error:
            raise ModelError(error.message, error.fix) from error
        finally:
            self._listeners.discard(on_progress)

    async def close(self) -> None:
        if self._model is not None:
            model, self._model = self._model, None
            self._past_restarts += model.client.num_restarts
            await model.close()

    def status(self) -> dict[str, Any]:
        if self._model is None:
            return {"name": self._config.model, "loaded": False, "engine restarts": self._past_restarts}
        client = self._model.client
        return {
            "name": self._config.model,
            "loaded": client.failure is None,
            "backend": client.info.backend,
            "context": client.info.context,
            "engine restarts": self._past_restarts + client.num_restarts,
        }

    async def _load(self) -> LocalChatModel:
        path = await asyncio.to_thread(self._models.resolve, self._config.model)
        settings = EngineSettings(
            path, backend=self._config.backend, max_sequences=self._config.max_sequences, context=self._config.context
        )
        return await LocalChatModel.load(settings, self._tell, name=self._config.model)

    def _tell(self, message: str, done: int, total: int) -> None:
        for listener in list(self._listeners):
            listener(message, done, total)

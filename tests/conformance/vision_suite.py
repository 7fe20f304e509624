"""What every engine with Capability.VISION must do; part of the suite of engine_suite.py."""

from __future__ import annotations

import pytest

from kvloom_common.text.prompt_images import image_token_ids
from shard_server.engines.base import Capability, EngineError, EngineImage
from tests.conformance.engine_driver import prompt_of, request_of
from tests.conformance.started_engines import BLOCK_SIZE, StartedEngines, StartEngine
from tests.fakes.pictures import png


class VisionSuite(StartedEngines):
    """Engines without the capability refuse images, and skip the rest."""

    async def test_images_are_seen_and_cached_by_their_content(self, start: StartEngine) -> None:
        """An image that comes again is found in the cache; another one shares what stands before it, and no more."""
        driver = await start()
        size = 3 * BLOCK_SIZE
        before, after = prompt_of(1, 2 * BLOCK_SIZE), prompt_of(2, 5)
        answers = {}
        for name, shade in {"first": 10, "again": 10, "other": 200}.items():
            content = png(shade=shade)
            image = EngineImage(len(before), size, "image/png", content)
            prompt = [*before, *image_token_ids(content, size), *after]
            request = request_of(name, prompt, 8, images=[image])
            if Capability.VISION not in driver.engine.info.capabilities:
                with pytest.raises(EngineError):
                    driver.engine.submit(request)
                return
            [answers[name]] = await driver.run(request)
        assert answers["first"] == answers["again"] != answers["other"]
        if Capability.PREFIX_CACHING in driver.engine.info.capabilities:
            cached = {name: driver.starts[name].num_cached_tokens for name in answers}
            assert cached == {"first": 0, "again": 5 * BLOCK_SIZE, "other": 2 * BLOCK_SIZE}

    async def test_the_tokens_of_an_image_need_the_image(self, start: StartEngine) -> None:
        """No vocabulary has them, so without it they are refused as any unknown token is."""
        driver = await start()
        with pytest.raises(EngineError):
            driver.engine.submit(request_of("blind", [5, *image_token_ids(b"x", 3), 6], 4))

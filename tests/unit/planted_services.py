"""Rewards that call a service by different HTTP clients. They have a file of their own, because only their workers
need the clients."""

from __future__ import annotations

import urllib.request

import aiohttp
import httpx
import requests
from openai import AsyncOpenAI, OpenAI

CLIENTS = {
    "httpx": lambda url: httpx.get(url, timeout=60),
    "openai": lambda url: OpenAI(base_url=url, api_key="-", max_retries=0).models.list(),
    "requests": lambda url: requests.get(url, timeout=60),
    "urllib": lambda url: urllib.request.urlopen(url, timeout=60).read(),
}


def at_once(response: str) -> float:
    """Call the client and the URL that the response names, and return 1 if the service answers."""
    client, url = response.split()
    CLIENTS[client](url)
    return 1.0


async def by_aiohttp(url: str) -> None:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        await answer.read()


async def by_httpx(url: str) -> None:
    async with httpx.AsyncClient() as client:
        await client.get(url)


async def by_openai(url: str) -> None:
    async with AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:
        await client.models.list()


async def meanwhile(response: str) -> float:
    client, url = response.split()
    await {"aiohttp": by_aiohttp, "httpx": by_httpx, "openai": by_openai}[client](url)
    return 1.0

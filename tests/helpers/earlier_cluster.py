"""A Postgres cluster as left by versions in which the services were superuser."""

from __future__ import annotations

from turboserve.cli.embedded import PostgresServer
from turboserve.cli.embedded.postgres import DATABASE, ROLE


async def make_as_before(server: PostgresServer) -> None:
    """Drop the services' role, and make the superuser own the database and everything in it."""
    async with server.superuser() as connection:
        await connection.execute(f'drop database "{DATABASE}"')
        await connection.execute(f"drop role {ROLE}")
        await connection.execute(f'create database "{DATABASE}"')
    async with server.superuser(DATABASE) as connection:
        await connection.execute(
            "create table sessions (n bigint generated always as identity primary key, x int);"
            "insert into sessions (x) values (7); create sequence alone; create type kind as enum ('a');"
            "create view seen as select x from sessions"
        )

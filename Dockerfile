# The supervisor alone: no torch, no Node at run time. The trainer's environment is built on the nodes.
FROM python:3.12-slim-bookworm AS build
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends openssh-client && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 10001 dflash
COPY requirements/supervisor.txt /tmp/supervisor.txt
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --no-deps --require-hashes -r /tmp/supervisor.txt \
 && pip install --no-cache-dir --no-deps /wheels/*.whl && rm -rf /wheels /tmp/supervisor.txt
USER dflash
EXPOSE 8420
CMD ["dflashctl", "serve", "--help"]

# The image of all five services. BASE may be any Debian 12 image with Python 3.11 or later.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS build
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev linux-libc-dev make \
 && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN python3 -m venv /opt/dsec \
 && /opt/dsec/bin/pip install --no-cache-dir "/source[broker,scheduler,sandboxd,chronus,tracer]"

FROM ${BASE}
RUN apt-get update \
 && apt-get install --yes --no-install-recommends erofs-utils \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/dsec /opt/dsec
ENV PATH=/opt/dsec/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
CMD ["dsec", "--help"]

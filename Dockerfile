# The image of all five services and the command line. BASE may be any Debian 12 image with Python 3.11
# or later; packages that it has already are not fetched again, so it may be one of your own that needs
# no package mirror.
ARG BASE=python:3.11-slim-bookworm

# What the services depend on: built again only when pyproject.toml changes.
FROM ${BASE} AS dependencies
RUN if ! command -v gcc || ! command -v make || ! find /usr/lib -name libc.a | grep -q .; then \
      apt-get update \
      && apt-get install --yes --no-install-recommends gcc libc6-dev linux-libc-dev make musl-tools \
      && rm -rf /var/lib/apt/lists/*; \
    fi
COPY pyproject.toml /source/
RUN python3 -m venv /build && python3 -m venv /opt/dsec \
 && python3 -c "import tomllib; \
told = tomllib.load(open('/source/pyproject.toml', 'rb')); \
project = told['project']; extras = project['optional-dependencies']; \
services = ('broker', 'scheduler', 'sandboxd', 'chronus', 'tracer'); \
needed = [*project['dependencies'], *(one for name in services for one in extras[name])]; \
open('/build/requires', 'w').write('\n'.join(told['build-system']['requires'])); \
open('/build/needed', 'w').write('\n'.join(needed))" \
 && /build/bin/pip install --no-cache-dir --requirement /build/requires \
 && /opt/dsec/bin/pip install --no-cache-dir --requirement /build/needed

FROM dependencies AS build
COPY . /source
RUN /build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels /source \
 && /opt/dsec/bin/pip install --no-cache-dir --no-deps /wheels/*.whl

FROM ${BASE}
RUN if ! command -v mkfs.erofs; then \
      apt-get update \
      && apt-get install --yes --no-install-recommends erofs-utils \
      && rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=build /opt/dsec /opt/dsec
ENV PATH=/opt/dsec/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
CMD ["dsec", "--help"]

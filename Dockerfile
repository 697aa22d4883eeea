# The prediction service with the shipped bundles: no torch, not root, needs no writable file system.
#
#   docker build -t gpumemnet .
#   docker run --rm --read-only -p 8000:8000 gpumemnet
#
# Settings are variables (service/settings.py); own bundles: -v ./my-bundle:/bundle:ro -e GPUMEMNET_BUNDLES=/bundle

FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY gpumemnet gpumemnet
COPY service service
RUN python -m venv --without-pip /opt/gpumemnet \
 && pip --python /opt/gpumemnet/bin/python install --no-cache-dir --constraint constraints.txt '.[service]'

FROM python:3.12-slim
COPY --from=build /opt/gpumemnet /opt/gpumemnet
ENV PATH=/opt/gpumemnet/bin:$PATH \
    PYTHONUNBUFFERED=1
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=15s \
  CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/readyz', timeout=2)"]
CMD ["python", "-m", "service", "--host", "0.0.0.0", "--port", "8000"]

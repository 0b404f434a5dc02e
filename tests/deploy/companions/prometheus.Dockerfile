# Prometheus from Debian's packages, with the entry point, the data folder and the wget of the official image.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
RUN apt-get update \
    && apt-get install -y --no-install-recommends prometheus wget \
    && rm -rf /var/lib/apt/lists/* \
    && install -d -o 65534 -g 65534 /prometheus
EXPOSE 9090
ENTRYPOINT ["prometheus"]

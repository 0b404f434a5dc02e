# Prometheus from Debian's package, with the entry point, the data folder and the wget of the official image. Of the package alone: it depends
# on 300 MB for its web pages, which nobody opens here.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
WORKDIR /tmp
RUN apt-get update \
    && apt-get install -y --no-install-recommends wget \
    && apt-get download prometheus \
    && dpkg -x prometheus_*.deb package \
    && cp -r package/usr/bin package/usr/share /usr/ \
    && rm -rf package prometheus_*.deb /var/lib/apt/lists/* /var/cache/apt/* \
    && install -d -o 65534 -g 65534 /prometheus
WORKDIR /
EXPOSE 9090
ENTRYPOINT ["prometheus"]

// dimensions of size zero are cut like others
module @f attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<0x8xf32> {mhlo.sharding = "{devices=[2,4]<=[8]}"}, %arg1: tensor<8x0xf32> {mhlo.sharding = "{devices=[8,1]<=[8]}"}) -> (tensor<0x8xf32> {mhlo.sharding = "{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}"}, tensor<8x0xf32>) {
    return %arg0, %arg1 : tensor<0x8xf32>, tensor<8x0xf32>
  }
}
